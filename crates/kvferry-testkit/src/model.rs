//! Models free of any parallelism: layers, the tensors of a layer, the states in a tensor.

use std::collections::BTreeMap;

use kvferry_layout::{Axis, Format, Kind, Law, Window};

/// A model: what both sides of a transfer agree on.
#[derive(Clone, Debug)]
pub struct Model {
    /// What makes equal shapes mean equal things.
    pub identity: BTreeMap<String, String>,
    /// The layers, drafts included.
    pub layers: Vec<Layer>,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Prefix of the names of its states.
    pub name: String,
    /// What it remembers.
    pub tensors: Vec<Tensor>,
}

/// States that an engine allocates as one tensor: K and V, or the sections of a convolution.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// How many entries each of them has.
    pub law: Law,
    /// Which tokens the layer looks back at.
    pub sight: Sight,
    /// The sections.
    pub states: Vec<State>,
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Its name.
    pub name: String,
    /// Its element.
    pub format: Format,
    /// The axes of an entry.
    pub axes: Vec<Axis>,
    /// How tensor parallelism may divide it; `None` where every rank needs all of it.
    pub cut: Option<Cut>,
}

/// The axis along which ranks divide a state, and the number of parts that must stay whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The axis.
    pub axis: usize,
    /// How many whole parts the axis has.
    pub units: u64,
}

/// Which tokens the next one looks back at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sight {
    /// All of them.
    Full,
    /// Itself and those before it, this many together.
    Sliding(u64),
    /// Those of its own chunk of this many.
    Chunked(u64),
}

impl Sight {
    /// Whether the token after `n` tokens (the one at position `n`) looks back at position `at`.
    pub fn sees(&self, n: u64, at: u64) -> bool {
        match *self {
            Self::Full => true,
            Self::Sliding(tokens) => n - at < tokens,
            Self::Chunked(chunk) => n / chunk == at / chunk,
        }
    }

    /// The first position that it looks back at, and `extra` positions more; found by looking.
    pub fn first(&self, n: u64, extra: u64) -> u64 {
        (0..=n).find(|&at| self.sees(n, at)).unwrap_or(n).saturating_sub(extra)
    }

    /// The same as a window of a group.
    pub fn window(&self, extra: u64) -> Window {
        match *self {
            Self::Full => Window { extra, ..Window::FULL },
            Self::Sliding(tokens) => Window { extra, ..Window::sliding(tokens) },
            Self::Chunked(chunk) => Window { extra, ..Window::chunked(chunk) },
        }
    }
}

impl State {
    /// A state.
    pub fn new(name: impl Into<String>, format: &Format, axes: &[(&str, u64)]) -> Self {
        let axes = axes.iter().map(|&(name, length)| Axis::new(name, length)).collect();
        Self { name: name.into(), format: format.clone(), axes, cut: None }
    }

    /// Divided along `axis` in `units` parts.
    pub fn cut(mut self, axis: usize, units: u64) -> Self {
        assert_eq!(self.axes[axis].length % units, 0, "{}: units of equal size", self.name);
        self.cut = Some(Cut { axis, units });
        self
    }

    /// Its kind, under a law.
    pub fn kind(&self, law: Law) -> Kind {
        Kind { format: self.format.clone(), axes: self.axes.clone(), law }
    }
}

impl Tensor {
    /// A tensor of per-token states.
    pub fn tokens(sight: Sight, states: Vec<State>) -> Self {
        Self { law: Law::PER_TOKEN, sight, states }
    }

    /// A tensor of states that are one entry for the whole sequence.
    pub fn snapshot(states: Vec<State>) -> Self {
        Self { law: Law::SNAPSHOT, sight: Sight::Full, states }
    }
}

impl Model {
    /// A model of these layers.
    pub fn new(layers: Vec<Layer>) -> Self {
        let identity = [("model", "judged"), ("revision", "1"), ("rope", "neox")];
        let identity = identity.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Self { identity: identity.into(), layers }
    }

    /// Every tensor with the indices of its layer and of itself.
    pub fn tensors(&self) -> impl Iterator<Item = ((usize, usize), &Tensor)> {
        self.layers.iter().enumerate().flat_map(|(layer, facts)| {
            let tensors = facts.tensors.iter().enumerate();
            tensors.map(move |(index, tensor)| ((layer, index), tensor))
        })
    }

    /// Every state.
    pub fn states(&self) -> impl Iterator<Item = (&Tensor, &State)> {
        self.tensors()
            .flat_map(|(_, tensor)| tensor.states.iter().map(move |state| (tensor, state)))
    }
}
