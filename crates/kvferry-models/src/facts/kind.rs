//! One kind of memory: its tensors and states, and how ranks share them.

use std::collections::BTreeMap;

use kvferry_layout::{Axis, Format, Kind, Law};
use serde::{Deserialize, Serialize};

use super::expression::{Expression, NoValue};
use crate::error::FactsError;
use crate::model::{Limit, Packing, Recurrence, Rule, Sort, Split, State, Tensor};

/// What a module of a layer keeps, for any sizes: which states, along which axes, how tensor
/// parallelism shares them, and in which order they are packed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StateKind {
    /// What it is, for people.
    about: String,
    sort: SortWord,
    pub(super) law: LawWord,
    /// The sizes that say how large it is. All else is computed from them.
    pub(super) sizes: Vec<String>,
    /// The formats that are up to the model, or the engine: `model` is that of the model's numbers.
    #[serde(default = "model_format")]
    formats: Vec<String>,
    /// What must be equal: `inner = heads * head`.
    #[serde(default)]
    pub(super) checks: Vec<Check>,
    /// In the order in which they are packed.
    pub(super) tensors: Vec<TensorFacts>,
    /// What an engine can only split evenly.
    #[serde(default)]
    pub(super) limits: Vec<LimitFacts>,
}

fn model_format() -> Vec<String> {
    vec!["model".to_owned()]
}

/// How engines treat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum SortWord {
    Attention,
    Latent,
    Indexer,
    Recurrent,
}

/// How many entries there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LawWord {
    /// One for each token.
    Token,
    /// One for the whole sequence.
    Sequence,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorFacts {
    #[serde(default)]
    pub(super) packing: PackingWord,
    spare: Option<Spare>,
    pub(super) states: Vec<StateFacts>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PackingWord {
    #[default]
    Plain,
    Planes,
    Convolution,
}

/// Columns beside the live ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Spare {
    /// One for each speculative token.
    Speculative,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StateFacts {
    pub(super) name: String,
    /// One of the kind's formats, or one that is always the same.
    format: String,
    pub(super) axes: Vec<(String, Expression)>,
    /// The axis that ranks share, and the number of units along it that stay whole. Where there are
    /// fewer units than ranks, several ranks hold the same unit. Without it every rank holds all.
    pub(super) split: Option<(String, Expression)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Check(pub(super) Expression, pub(super) Expression);

impl TryFrom<String> for Check {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let Some((left, right)) = text.split_once('=') else {
            return Err(format!("'{text}' is not of the form 'one = other'"));
        };
        Ok(Self(left.to_owned().try_into()?, right.to_owned().try_into()?))
    }
}

impl From<Check> for String {
    fn from(Check(left, right): Check) -> Self {
        format!("{left} = {right}")
    }
}

/// Something that tensor parallelism has to divide.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitFacts {
    what: String,
    pub(super) count: Expression,
    pub(super) rule: Rule,
}

impl LimitFacts {
    pub(super) fn limit(&self, count: u64) -> Limit {
        Limit { what: self.what.clone(), count, rule: self.rule }
    }
}

impl StateKind {
    /// The sizes that it needs.
    pub fn sizes(&self) -> impl Iterator<Item = &str> {
        self.sizes.iter().map(String::as_str)
    }

    /// The formats that it needs.
    pub fn formats(&self) -> impl Iterator<Item = &str> {
        self.formats.iter().map(String::as_str)
    }

    /// How engines treat it. `name` is its own; the window is a fact of the layer.
    pub(super) fn sort(&self, name: &str, window: Option<u64>) -> Sort {
        match self.sort {
            SortWord::Attention => Sort::Attention { window },
            SortWord::Latent => Sort::Latent { indexed: false, window },
            SortWord::Indexer => Sort::Indexer,
            SortWord::Recurrent => Sort::Recurrent(Recurrence::new(name)),
        }
    }

    /// Whether a sliding window means anything to it.
    pub(super) fn can_slide(&self) -> bool {
        matches!(self.sort, SortWord::Attention | SortWord::Latent)
    }

    pub(super) fn tensors(
        &self,
        name: &str,
        known: &BTreeMap<String, Format>,
        sizes: &[(&str, u64)],
        formats: &[(&str, &Format)],
    ) -> Result<Vec<Tensor>, FactsError> {
        let wrong = |problem: String| FactsError::Sizes { kind: name.to_owned(), problem };
        for (size, value) in sizes {
            if !self.sizes.iter().any(|known| known == size) {
                let sizes = self.sizes.join(", ");
                return Err(wrong(format!("it has no size '{size}', only {sizes}")));
            }
            if *value == 0 {
                return Err(wrong(format!("its size '{size}' is 0, but should be at least 1")));
            }
        }
        let value = |expression: &Expression| self.value(name, expression, sizes);
        for Check(left, right) in &self.checks {
            let (one, other) = (value(left)?, value(right)?);
            if one != other {
                let problem =
                    format!("{left} is {one}, but should equal {right}, which is {other}");
                return Err(wrong(problem));
            }
        }
        let mut bytes: u64 = 0;
        let mut tensors = vec![];
        for tensor in &self.tensors {
            let mut states = vec![];
            for state in &tensor.states {
                let given = formats.iter().find(|(role, _)| *role == state.format);
                let format = match given {
                    Some((_, format)) => (*format).clone(),
                    None => known.get(&state.format).cloned().ok_or_else(|| {
                        wrong(format!("its format '{}' is not given", state.format))
                    })?,
                };
                let mut axes = vec![];
                let mut size = Some(u64::from(format.bytes));
                for (axis, length) in &state.axes {
                    let count = value(length)?;
                    if count == 0 {
                        let problem = format!("{length} is 0, but should be at least 1");
                        return Err(wrong(problem));
                    }
                    size = size.and_then(|size| size.checked_mul(count));
                    axes.push(Axis::new(axis, count));
                }
                bytes = size
                    .and_then(|size| bytes.checked_add(size))
                    .filter(|bytes| *bytes <= MAX_ENTRY)
                    .ok_or_else(|| wrong(format!("an entry has more than {MAX_ENTRY} bytes")))?;
                let mut split = None;
                if let Some((axis, units)) = &state.split {
                    let units = value(units)?;
                    let axis = axes.iter().position(|known| known.name == *axis);
                    let axis = axis.expect("checked when it was read");
                    if units == 0 || axes[axis].length % units != 0 {
                        let (state, axis) = (&state.name, &axes[axis]);
                        let problem =
                            format!("{units} units do not divide the axis {axis} of {state}");
                        return Err(wrong(problem));
                    }
                    split = Some(Split { axis, units });
                }
                let law = match self.law {
                    LawWord::Token => Law::PER_TOKEN,
                    LawWord::Sequence => Law::SNAPSHOT,
                };
                states.push(State {
                    name: state.name.clone(),
                    kind: Kind { format, axes, law },
                    split,
                });
            }
            let packing = match tensor.packing {
                PackingWord::Plain => Packing::Plain,
                PackingWord::Planes => Packing::Planes,
                PackingWord::Convolution => {
                    Packing::Convolution { grows: tensor.spare == Some(Spare::Speculative) }
                }
            };
            tensors.push(Tensor { states, packing });
        }
        Ok(tensors)
    }

    /// What tensor parallelism has to divide.
    pub(super) fn limits(
        &self,
        name: &str,
        sizes: &[(&str, u64)],
    ) -> Result<Vec<Limit>, FactsError> {
        let limit = |facts: &LimitFacts| Ok(facts.limit(self.value(name, &facts.count, sizes)?));
        self.limits.iter().map(limit).collect()
    }

    fn value(
        &self,
        name: &str,
        expression: &Expression,
        sizes: &[(&str, u64)],
    ) -> Result<u64, FactsError> {
        let look = |size: &str| -> Result<_, std::convert::Infallible> {
            Ok(sizes.iter().find(|(known, _)| *known == size).map(|(_, value)| *value))
        };
        expression.value(&look).map_err(|problem| {
            let problem = match problem {
                NoValue::Missing(size) => format!("its size '{size}' is not given"),
                NoValue::Unfit { part, value, expected } => {
                    format!("{part} is {value}, but should be {expected}")
                }
                NoValue::Lookup(never) => match never {},
            };
            FactsError::Sizes { kind: name.to_owned(), problem }
        })
    }

    /// What is wrong with the definition, if anything.
    pub(super) fn problem(&self, known: &BTreeMap<String, Format>) -> Option<String> {
        let names = |expression: &Expression| {
            let mut names = expression.names().into_iter();
            let unknown = names.find(|name| !self.sizes.iter().any(|size| size == name))?;
            Some(format!("'{expression}' uses '{unknown}', which is not one of its sizes"))
        };
        let recurrent = self.sort == SortWord::Recurrent;
        if recurrent != (self.law == LawWord::Sequence) {
            return Some("a recurrent kind has the law 'sequence', and all others 'token'".into());
        }
        if self.tensors.is_empty() || self.tensors.iter().any(|tensor| tensor.states.is_empty()) {
            return Some("it must have a tensor, and every tensor a state".into());
        }
        let mut seen: Vec<&str> = vec![];
        for tensor in &self.tensors {
            let convolution = tensor.packing == PackingWord::Convolution;
            if convolution && !recurrent || tensor.packing == PackingWord::Planes && recurrent {
                return Some(
                    "convolutions are for recurrent kinds, and planes for all others".into(),
                );
            }
            if tensor.spare.is_some() && !convolution {
                return Some("only a convolution has spare columns".into());
            }
            for state in &tensor.states {
                let name = &state.name;
                if name.is_empty() || seen.contains(&name.as_str()) {
                    return Some(format!("its states need names of their own, not '{name}' twice"));
                }
                seen.push(name);
                if !self.formats.contains(&state.format) && !known.contains_key(&state.format) {
                    return Some(format!(
                        "{name} has the format '{}', which is neither one of its formats nor known",
                        state.format
                    ));
                }
                let axes: Vec<&str> = state.axes.iter().map(|(axis, _)| axis.as_str()).collect();
                if convolution && axes != ["channel", "column"] {
                    return Some(format!("{name}: a convolution has the axes channel and column"));
                }
                if self.sort == SortWord::Attention && axes.first() != Some(&"head") {
                    return Some(format!("{name}: attention has heads on its first axis"));
                }
                if let Some((axis, units)) = &state.split {
                    if axes.first() != Some(&axis.as_str()) {
                        return Some(format!(
                            "{name} is split along '{axis}', but ranks share the first axis"
                        ));
                    }
                    if let Some(problem) = names(units) {
                        return Some(problem);
                    }
                }
                if let Some(problem) = state.axes.iter().find_map(|(_, length)| names(length)) {
                    return Some(problem);
                }
            }
        }
        let checks = self.checks.iter().flat_map(|Check(left, right)| [left, right]);
        checks.chain(self.limits.iter().map(|limit| &limit.count)).find_map(names)
    }
}

/// An entry of all states of a layer may have so many bytes: far above every real one.
const MAX_ENTRY: u64 = 1 << 36;
