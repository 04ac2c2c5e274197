//! Models that differ from another in one thing: pairs of them must not fit.

use kvferry_layout::Law;

use crate::model::{Layer, Model, State, Tensor};
use crate::random::Dice;

/// What differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// The name of a format.
    FormatName,
    /// The bytes of a format.
    FormatBytes,
    /// The length of an axis.
    AxisLength,
    /// The name of an axis.
    AxisName,
    /// One axis more.
    AxisCount,
    /// The law.
    Law,
    /// A value of the identity.
    Identity,
    /// A fact of the identity that only one side states.
    IdentityFact,
    /// A layer is not there.
    Layer,
    /// A state is not there.
    State,
}

impl Difference {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::FormatName,
        Self::FormatBytes,
        Self::AxisLength,
        Self::AxisName,
        Self::AxisCount,
        Self::Law,
        Self::Identity,
        Self::IdentityFact,
        Self::Layer,
        Self::State,
    ];

    /// The model with this difference somewhere; `None` where it has no place for one.
    pub fn apply(self, model: &Model, dice: &mut Dice) -> Option<Model> {
        let mut model = model.clone();
        match self {
            Self::Identity => {
                let fact = model.identity.values_mut().next()?;
                fact.push_str(" (other)");
                return Some(model);
            }
            Self::IdentityFact => {
                model.identity.insert("quantisation".to_owned(), "fp8".to_owned());
                return Some(model);
            }
            _ => {}
        }
        let at = dice.index(model.layers.len());
        if self == Self::Layer {
            model.layers.remove(at);
            return (!model.layers.is_empty()).then_some(model);
        }
        let layer: &mut Layer = &mut model.layers[at];
        let at = dice.index(layer.tensors.len());
        let tensor: &mut Tensor = &mut layer.tensors[at];
        if self == Self::Law {
            tensor.law = match tensor.law.entries {
                0 => Law { open: tensor.law.open + 1, ..tensor.law },
                _ if dice.chance(50) => Law { open: tensor.law.open + 1, ..tensor.law },
                _ => Law { tokens: tensor.law.tokens + 1, ..tensor.law },
            };
            return Some(model);
        }
        let at = dice.index(tensor.states.len());
        if self == Self::State {
            tensor.states.remove(at);
            layer.tensors.retain(|tensor| !tensor.states.is_empty());
            model.layers.retain(|layer| !layer.tensors.is_empty());
            return (!model.layers.is_empty()).then_some(model);
        }
        let state: &mut State = &mut tensor.states[at];
        match self {
            Self::FormatName => state.format.name.push('x'),
            Self::FormatBytes => state.format.bytes += 1,
            Self::AxisCount => state.axes.push(kvferry_layout::Axis::new("more", 1)),
            _ if state.axes.is_empty() => return None,
            _ => {
                let at = dice.index(state.axes.len());
                let axis = &mut state.axes[at];
                if self == Self::AxisName {
                    axis.name.push('x');
                } else {
                    match &mut state.cut {
                        Some(cut) if cut.axis == at => {
                            axis.length += axis.length / cut.units;
                            cut.units += 1;
                        }
                        _ => axis.length += 1,
                    }
                }
            }
        }
        Some(model)
    }
}
