//! What a model keeps of a prompt, free of any parallelism.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_layout::{Format, Kind, Law, Span, StateBox, Window};
use serde::{Deserialize, Serialize};

/// A model's memory of a prompt: every state of every layer, and what tensor parallelism may split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Its name: a preset's, or the file's.
    pub name: String,
    /// The value of `model_type`.
    pub family: String,
    /// The format of its numbers.
    pub format: Format,
    /// Decoder layers, those without any memory of their own included: what pipeline stages divide.
    pub layers: u32,
    /// What its modules keep, in the order in which an engine meets them.
    pub caches: Vec<Cache>,
    /// What must divide by the number of tensor-parallel ranks.
    pub limits: Vec<Limit>,
    /// The draft model's name, if one is attached.
    pub draft: Option<String>,
    /// Draft layers that come with the model and can be attached by [`Model::with_own_draft`].
    pub(crate) own_draft: Vec<Cache>,
}

/// What one module of one layer keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The decoder layer that it belongs to, which says on which pipeline stage it lives. Draft layers
    /// live on the last stage.
    pub layer: u32,
    /// The last layer that reads it: its own, or one that keeps nothing itself. An engine has them on one
    /// stage.
    pub read_until: u32,
    /// Whether it belongs to a draft.
    pub draft: bool,
    /// What kind of memory it is.
    pub sort: Sort,
    /// Tokens in a block, where the module itself decides it, whatever the engine is told.
    pub block: Option<u64>,
    /// Bytes to a multiple of which the module rounds a block up.
    pub align: Option<u64>,
    /// Its tensors, in the order in which they are packed.
    pub tensors: Vec<Tensor>,
}

/// Kinds of memory, as far as an engine treats them differently.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sort {
    /// Keys and values of every token that the window still sees.
    Attention {
        /// The sliding window, in tokens; `None` when every token stays visible.
        window: Option<u64>,
    },
    /// One latent vector for each token that the window still sees, or for several.
    Latent {
        /// Whether a sparse-attention indexer stands beside it.
        indexed: bool,
        /// The sliding window, in tokens; `None` when every token stays visible.
        window: Option<u64>,
    },
    /// The keys of a sparse-attention indexer.
    Indexer,
    /// States of a fixed size for the whole sequence.
    Recurrent(Recurrence),
}

/// A kind of recurrent layers, by its name among the facts: `mamba2`, `gdn`, or a user's own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Recurrence(Arc<str>);

/// Numbers that are packed as one tensor: keys beside values, the sections of a convolution. All but
/// the joined axis have the same length in all of its states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its states, in order.
    pub states: Vec<State>,
    /// How they are packed.
    pub packing: Packing,
}

/// How the states of a tensor are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// One after the other: along the content of a head, or a single state.
    Plain,
    /// Each state of all tokens of a kernel block, then the next state.
    Planes,
    /// The input of a convolution: a matrix of channels and columns, whose channels are the states one
    /// after the other. An engine stores it in either order.
    Convolution {
        /// Whether an engine appends columns for speculative tokens.
        grows: bool,
    },
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Its name, the same in every engine: `layers.3/k`.
    pub name: String,
    /// Format, axes and law.
    pub kind: Kind,
    /// How tensor parallelism splits it; `None` when every rank holds all of it.
    pub split: Option<Split>,
}

/// A split along one axis into units that stay whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Index of the axis.
    pub axis: usize,
    /// Units along it; they are of equal length.
    pub units: u64,
}

impl Split {
    /// The units of rank `rank` of `ranks`. Where there are fewer units than ranks, several ranks hold
    /// the same unit.
    fn units_of(&self, rank: u64, ranks: u64) -> Span {
        let first = rank * self.units / ranks;
        (first..first + (self.units / ranks).max(1)).into()
    }
}

impl State {
    /// What rank `rank` of `ranks` holds.
    pub fn held(&self, rank: u64, ranks: u64) -> StateBox {
        let mut held = StateBox::whole(&self.kind.axes);
        if let Some(split) = self.split {
            let (units, span) = (split.units_of(rank, ranks), &mut held.0[split.axis]);
            let length = span.len() / split.units;
            *span = (units.start * length..units.end * length).into();
        }
        held
    }

    /// Bytes of one entry in the whole model.
    pub fn entry_bytes(&self) -> u64 {
        let elements: u64 = self.kind.axes.iter().map(|axis| axis.length).product();
        elements * u64::from(self.kind.format.bytes)
    }
}

impl Cache {
    /// All states.
    pub fn states(&self) -> impl Iterator<Item = &State> {
        self.tensors.iter().flat_map(|tensor| &tensor.states)
    }

    /// Bytes of one entry of every state, in the whole model.
    pub fn entry_bytes(&self) -> u64 {
        self.states().map(State::entry_bytes).sum()
    }

    /// Which tokens stay live.
    pub fn window(&self) -> Window {
        self.sort.window().map_or(Window::FULL, Window::sliding)
    }

    /// Tokens that one entry stands for; one for states of a fixed size.
    pub fn tokens_per_entry(&self) -> u64 {
        self.states().next().map_or(1, |state| state.kind.law.tokens.into())
    }

    /// The cache with one entry for every `tokens` tokens.
    pub(crate) fn every(mut self, tokens: u32) -> Self {
        for state in self.tensors.iter_mut().flat_map(|tensor| &mut tensor.states) {
            state.kind.law = Law::every(tokens);
        }
        self
    }
}

impl Sort {
    /// A word for tables.
    pub fn word(&self) -> &str {
        match self {
            Self::Attention { window: None } => "attention",
            Self::Attention { window: Some(_) } => "sliding",
            Self::Latent { window: None, .. } => "mla",
            Self::Latent { window: Some(_), .. } => "sliding mla",
            Self::Indexer => "indexer",
            Self::Recurrent(kind) => kind.word(),
        }
    }

    /// The sliding window, in tokens, if it has one.
    pub fn window(&self) -> Option<u64> {
        match self {
            Self::Attention { window } | Self::Latent { window, .. } => *window,
            Self::Indexer | Self::Recurrent(_) => None,
        }
    }

    /// Whether it is one entry for the whole sequence.
    pub fn is_recurrent(&self) -> bool {
        matches!(self, Self::Recurrent(_))
    }
}

impl Recurrence {
    pub(crate) fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Its name among the facts.
    pub fn word(&self) -> &str {
        &self.0
    }
}

/// Where a cache stands.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Layer(u64),
    /// One of several modules of a layer that keep states of the same names: an engine's own name for
    /// it tells them apart.
    Module {
        layer: u64,
        module: &'static str,
    },
    /// The n-th draft layer of a model with so many layers.
    Draft {
        number: u64,
        layers: u64,
    },
}

impl Place {
    /// What a module keeps here. The states in `tensors` are named without a layer.
    pub(crate) fn cache(self, sort: Sort, mut tensors: Vec<Tensor>) -> Cache {
        let (layer, draft, prefix) = match self {
            Self::Layer(layer) => (layer, false, format!("layers.{layer}")),
            Self::Module { layer, module } => {
                (layer, false, format!("model.layers.{layer}.{module}"))
            }
            Self::Draft { number, layers } => (layers - 1, true, format!("{DRAFT}layers.{number}")),
        };
        for state in tensors.iter_mut().flat_map(|tensor| &mut tensor.states) {
            state.name = format!("{prefix}/{}", state.name);
        }
        let layer = u32::try_from(layer).expect("the number of layers is limited");
        Cache { layer, read_until: layer, draft, sort, block: None, align: None, tensors }
    }
}

/// What the names of a draft's states start with.
const DRAFT: &str = "draft/";

/// Something that tensor parallelism has to divide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What it is, in the plural: "KV heads".
    pub what: String,
    /// How many there are.
    pub count: u64,
    /// What is allowed.
    pub rule: Rule,
}

/// How a number relates to the number of tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Rule {
    /// It must divide by it.
    #[serde(rename = "divides")]
    Divides,
    /// It must divide by it, or it by the number.
    #[serde(rename = "either divides")]
    EitherDivides,
    /// It must divide by it, or be one.
    #[serde(rename = "divides or one")]
    DividesOrOne,
}

impl Limit {
    /// Why `ranks` ranks cannot share it, if they cannot.
    pub fn refuses(&self, ranks: u64) -> Option<String> {
        let (what, count) = (&self.what, self.count);
        let divides = count % ranks == 0;
        match self.rule {
            Rule::Divides if !divides => {
                Some(format!("its {count} {what} do not divide by {ranks}"))
            }
            Rule::EitherDivides if !divides && (ranks < count || !ranks.is_multiple_of(count)) => {
                Some(format!("its {count} {what} do not divide by {ranks}, nor {ranks} by {count}"))
            }
            Rule::DividesOrOne if !divides && count != 1 => {
                Some(format!("its {count} {what} neither divide by {ranks} nor are one"))
            }
            _ => None,
        }
    }
}

/// What a model keeps of a prompt of some length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes that every token adds for good, rounded up.
    pub per_token: u64,
    /// Bytes that a token adds while a sliding window sees it.
    pub per_window_token: u64,
    /// Bytes that full windows hold.
    pub windows: u64,
    /// Bytes of the states of a fixed size.
    pub per_sequence: u64,
}

impl Model {
    /// Sizes, in the whole model.
    pub fn footprint(&self) -> Footprint {
        let mut sizes = Footprint::default();
        // Bytes that a number of tokens adds, which fills entries of every law.
        let (mut tokens, mut bytes): (u64, u64) = (1, 0);
        for cache in &self.caches {
            let entry = cache.entry_bytes();
            match (cache.sort.is_recurrent(), cache.sort.window()) {
                (true, _) => sizes.per_sequence += entry,
                (false, Some(window)) => {
                    sizes.per_window_token += entry;
                    // The next token sees itself and all but one of a window before it.
                    sizes.windows += entry * (window - 1);
                }
                (false, None) => {
                    let rate = cache.tokens_per_entry();
                    let more = rate / common_divisor(tokens, rate);
                    (tokens, bytes) = (tokens * more, bytes * more);
                    bytes += entry * (tokens / rate);
                }
            }
        }
        sizes.per_token = bytes.div_ceil(tokens);
        sizes
    }

    /// Bytes that must move after `tokens` tokens, of which the other side holds `cached`: every live
    /// byte once. States of a fixed size move whole unless nothing is missing.
    pub fn minimum_bytes(&self, tokens: u64, cached: u64) -> u64 {
        let live = |cache: &Cache| {
            let first = cache.window().first_live(tokens).max(cached);
            let entries = |state: &State| match state.kind.law {
                Law::SNAPSHOT => {
                    state.kind.law.entries(tokens) - state.kind.law.held(cached, tokens)
                }
                law => law.entries(tokens).saturating_sub(law.closed(first)),
            };
            cache.states().map(|state| entries(state) * state.entry_bytes()).sum::<u64>()
        };
        self.caches.iter().map(live).sum()
    }

    /// Number of layers by kind, in the order of first appearance.
    pub fn layers_by_kind(&self) -> Vec<(String, usize)> {
        let mut order: Vec<(String, usize)> = vec![];
        for cache in &self.caches {
            let word = format!("{}{}", if cache.draft { "draft " } else { "" }, cache.sort.word());
            match order.iter_mut().find(|(known, _)| *known == word) {
                Some((_, count)) => *count += 1,
                None => order.push((word, 1)),
            }
        }
        order
    }

    /// What makes equal shapes mean equal things. Engines add what they choose themselves.
    pub fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = BTreeMap::from([
            ("model".to_owned(), self.name.clone()),
            ("family".to_owned(), self.family.clone()),
            ("format".to_owned(), self.format.name.clone()),
        ]);
        if let Some(draft) = &self.draft {
            identity.insert("draft".to_owned(), draft.clone());
        }
        identity
    }

    /// The model with `draft` attached: its layers come last and are named `draft/...`.
    #[must_use]
    pub fn with_draft(mut self, draft: &Self) -> Self {
        let last = self.layers.saturating_sub(1);
        for cache in &draft.caches {
            let mut cache = cache.clone();
            (cache.layer, cache.read_until) = (last, last);
            cache.draft = true;
            for state in cache.tensors.iter_mut().flat_map(|tensor| &mut tensor.states) {
                state.name = format!("{DRAFT}{}", state.name);
            }
            self.caches.push(cache);
        }
        self.limits.extend(draft.limits.iter().cloned());
        self.draft = Some(draft.name.clone());
        self
    }

    /// The model with the draft layers that its own configuration describes (multi-token prediction),
    /// or `None` when it describes none.
    pub fn with_own_draft(mut self) -> Option<Self> {
        if self.own_draft.is_empty() {
            return None;
        }
        self.caches.append(&mut self.own_draft);
        self.draft = Some("mtp".to_owned());
        Some(self)
    }
}

fn common_divisor(one: u64, other: u64) -> u64 {
    let (mut one, mut other) = (one, other);
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rule_splits_and_replicates() {
        let split = |units| Split { axis: 0, units };
        assert_eq!(split(8).units_of(3, 4), (6..8).into());
        assert_eq!(split(2).units_of(3, 4), (1..2).into());
        assert_eq!(split(2).units_of(1, 4), (0..1).into());
        assert_eq!(split(1).units_of(7, 8), (0..1).into());
        assert_eq!(split(96).units_of(5, 6), (80..96).into());
    }

    #[test]
    fn limits_say_what_they_refuse() {
        let limit = |count, rule| Limit { what: "heads".to_owned(), count, rule };
        assert!(limit(8, Rule::EitherDivides).refuses(16).is_none());
        assert!(limit(8, Rule::EitherDivides).refuses(12).is_some());
        assert!(limit(8, Rule::EitherDivides).refuses(3).is_some());
        assert!(limit(1, Rule::DividesOrOne).refuses(6).is_none());
        assert!(limit(2, Rule::DividesOrOne).refuses(4).is_some());
        assert!(limit(96, Rule::Divides).refuses(6).is_none());
    }
}
