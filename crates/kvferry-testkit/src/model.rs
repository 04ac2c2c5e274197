//! Models free of any parallelism: layers, the tensors of a layer, the states in a tensor.

use std::collections::BTreeMap;

use kvferry_layout::{Axis, Format, Kind, Law, Window};

use crate::random::Dice;

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

    /// A random model of one to four layers of any kinds, and perhaps a draft.
    pub fn draw(dice: &mut Dice) -> Self {
        let mut layers = vec![];
        // Some models are uniform, some repeat two kinds, some have a new kind in every layer.
        let count = dice.within(1, 4);
        let palette: Vec<u64> = (0..dice.within(1, 3)).map(|_| dice.any()).collect();
        for index in 0..count {
            let mut same = Dice::new(dice.pick(&palette));
            layers.push(draw_layer(format!("layers.{index}"), &mut same));
        }
        if dice.chance(25) {
            layers.push(draw_layer("draft.0".to_owned(), dice));
        }
        Self::new(layers)
    }
}

fn draw_layer(name: String, dice: &mut Dice) -> Layer {
    let number = dice.pick(&[Format::new("bf16", 2), Format::new("f16", 2), Format::new("f32", 4)]);
    let wide = Format::new("f32", 4);
    let named = |part: &str| format!("{name}/{part}");
    let sight = match dice.within(0, 5) {
        0 | 1 => Sight::Sliding(dice.within(1, 20)),
        2 => Sight::Chunked(dice.within(1, 12)),
        _ => Sight::Full,
    };
    let columns = dice.within(1, 4);
    let conv = |part: &str, channels: u64, units: u64| {
        State::new(named(part), &number, &[("channel", channels), ("column", columns)])
            .cut(0, units)
    };
    let tensors = match dice.within(0, 12) {
        // Grouped-query and multi-head attention.
        0..=2 => {
            let heads = dice.pick(&[1, 2, 3, 4, 5, 6, 8]);
            let (dim, dim_v) = (dice.within(1, 4), dice.within(1, 4));
            let dim_v = if dice.chance(70) { dim } else { dim_v };
            let k = State::new(named("k"), &number, &[("head", heads), ("dim", dim)]);
            let v = State::new(named("v"), &number, &[("head", heads), ("dim", dim_v)]);
            vec![Tensor::tokens(sight, vec![k.cut(0, heads), v.cut(0, heads)])]
        }
        // A quantised page: K, V and scales of a head and token in one opaque record.
        3 => {
            let heads = dice.pick(&[1, 2, 3, 4, 6]);
            let record = Format::new("int8_per_token_head", dice.within(3, 11) as u32);
            let kv = State::new(named("kv"), &record, &[("head", heads)]).cut(0, heads);
            vec![Tensor::tokens(sight, vec![kv])]
        }
        // Latents, with or without an indexer of another size.
        4 | 5 => {
            let latent = match dice.chance(50) {
                true => State::new(named("latent"), &number, &[("dim", dice.within(1, 9))]),
                false => State::new(named("latent"), &Format::new("fp8_ds_mla", 13), &[]),
            };
            let mut tensors = vec![Tensor::tokens(sight, vec![latent])];
            if dice.chance(50) {
                let record = Format::new("fp8_indexer", dice.within(1, 6) as u32);
                let law = dice.pick(&[Law::PER_TOKEN, Law::PER_TOKEN, Law::every(2)]);
                let states = vec![State::new(named("indexer"), &record, &[])];
                tensors.push(Tensor { law, sight, states });
            }
            tensors
        }
        // Compressed: several tokens in an entry, the last of them perhaps still open.
        6 => {
            let tokens = dice.within(1, 5) as u32;
            let law =
                Law { entries: dice.within(1, 2) as u32, tokens, open: dice.pick(&[0, 0, 1, 2]) };
            let heads = dice.within(1, 3);
            let c = State::new(named("c"), &number, &[("head", heads), ("dim", dice.within(1, 3))]);
            vec![Tensor { law, sight, states: vec![c.cut(0, heads)] }]
        }
        // Mamba1.
        7 => {
            let inner = dice.pick(&[2, 4, 6, 9]);
            let ssm = State::new(
                named("ssm"),
                &wide,
                &[("channel", inner), ("state", dice.within(1, 3))],
            );
            vec![
                Tensor::snapshot(vec![conv("conv", inner, inner)]),
                Tensor::snapshot(vec![ssm.cut(0, inner)]),
            ]
        }
        // Mamba2: x by heads, B and C by groups.
        8 => {
            let heads = dice.pick(&[2, 4, 6]);
            let groups = dice.pick(&[1, 1, 2, heads]);
            let (dim, state) = (dice.within(1, 2), dice.within(1, 3));
            let sections = vec![
                conv("conv.x", heads * dim, heads),
                conv("conv.B", groups * state, groups),
                conv("conv.C", groups * state, groups),
            ];
            let axes = [("head", heads), ("dim", dim), ("state", state)];
            let ssm = State::new(named("ssm"), &wide, &axes).cut(0, heads);
            vec![Tensor::snapshot(sections), Tensor::snapshot(vec![ssm])]
        }
        // Gated delta net: one convolution over q|k|v, more value heads than key heads.
        9 => {
            let (key_heads, times) = (dice.pick(&[1, 2, 3, 4]), dice.within(1, 3));
            let (kd, vd) = (dice.within(1, 2), dice.within(1, 2));
            let value_heads = key_heads * times;
            let sections = vec![
                conv("conv.q", key_heads * kd, key_heads),
                conv("conv.k", key_heads * kd, key_heads),
                conv("conv.v", value_heads * vd, value_heads),
            ];
            let axes = [("head", value_heads), ("value", vd), ("key", kd)];
            let memory = State::new(named("memory"), &wide, &axes).cut(0, value_heads);
            vec![Tensor::snapshot(sections), Tensor::snapshot(vec![memory])]
        }
        // Kimi delta attention: three convolutions and one memory.
        10 => {
            let heads = dice.pick(&[2, 3, 4, 6]);
            let dim = dice.within(1, 2);
            let mut tensors: Vec<Tensor> = ["conv.q", "conv.k", "conv.v"]
                .map(|part| Tensor::snapshot(vec![conv(part, heads * dim, heads)]))
                .into();
            let axes = [("head", heads), ("value", dim), ("key", dim)];
            let memory = State::new(named("memory"), &wide, &axes).cut(0, heads);
            tensors.push(Tensor::snapshot(vec![memory]));
            tensors
        }
        // Short convolution, or linear attention.
        11 => match dice.chance(50) {
            true => {
                let channels = dice.pick(&[2, 3, 4, 6]);
                vec![Tensor::snapshot(vec![conv("conv", channels, channels)])]
            }
            false => {
                let heads = dice.pick(&[1, 2, 4]);
                let axes = [("head", heads), ("key", dice.within(1, 3)), ("value", 2)];
                vec![Tensor::snapshot(vec![State::new(named("kv"), &wide, &axes).cut(0, heads)])]
            }
        },
        // Something that nobody has built yet: any number of tensors of any shape.
        _ => (0..dice.within(1, 3))
            .map(|tensor| {
                let names = ["a", "b", "c", "d", "e", "f"];
                let shape: Vec<(&str, u64)> =
                    names[..dice.index(5)].iter().map(|&axis| (axis, dice.within(1, 3))).collect();
                let mut state = State::new(named(&format!("odd.{tensor}")), &number, &shape);
                if !shape.is_empty() && dice.chance(70) {
                    let axis = dice.index(shape.len());
                    state = state.cut(axis, shape[axis].1);
                }
                let law = match dice.within(0, 3) {
                    0 => Law { entries: 0, tokens: 1, open: dice.within(1, 3) as u32 },
                    1 => Law { entries: 3, tokens: 2, open: dice.within(0, 1) as u32 },
                    _ => Law::PER_TOKEN,
                };
                Tensor {
                    law,
                    sight: if law.entries > 0 { sight } else { Sight::Full },
                    states: vec![state],
                }
            })
            .collect(),
    };
    Layer { name, tensors }
}
