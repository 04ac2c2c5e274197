//! The kinds of layers that models have today, and some that nobody has built yet.

use kvferry_layout::{Format, Law};

use crate::model::{Layer, Model, Sight, State, Tensor};
use crate::random::Dice;

/// Two bytes a number.
pub fn bf16() -> Format {
    Format::new("bf16", 2)
}

/// Four bytes a number.
pub fn f32() -> Format {
    Format::new("f32", 4)
}

/// A convolution's section: channels in whole units, and live columns.
fn conv(
    layer: &str,
    part: &str,
    format: &Format,
    channels: u64,
    units: u64,
    columns: u64,
) -> State {
    let axes = [("channel", channels), ("column", columns)];
    State::new(format!("{layer}/{part}"), format, &axes).cut(0, units)
}

impl Layer {
    /// Grouped-query or multi-head attention: K and V by head.
    pub fn attention(name: &str, sight: Sight, heads: u64, dim: u64, dim_v: u64) -> Self {
        let state = |part: &str, dim: u64| {
            let axes = [("head", heads), ("dim", dim)];
            State::new(format!("{name}/{part}"), &bf16(), &axes).cut(0, heads)
        };
        let states = vec![state("k", dim), state("v", dim_v)];
        Self { name: name.to_owned(), tensors: vec![Tensor::tokens(sight, states)] }
    }

    /// A latent that every rank holds whole, and no V.
    pub fn latent(name: &str, dim: u64) -> Self {
        let state = State::new(format!("{name}/latent"), &bf16(), &[("dim", dim)]);
        Self { name: name.to_owned(), tensors: vec![Tensor::tokens(Sight::Full, vec![state])] }
    }

    /// The same with the opaque records of a sparse-attention indexer beside it.
    pub fn indexed_latent(name: &str, dim: u64, record: u32) -> Self {
        let mut layer = Self::latent(name, dim);
        let format = Format::new("fp8_indexer", record);
        let state = State::new(format!("{name}/indexer"), &format, &[]);
        layer.tensors.push(Tensor::tokens(Sight::Full, vec![state]));
        layer
    }

    /// Mamba2: a convolution over x|B|C, x by heads and B and C by groups, and a state by heads.
    pub fn mamba2(name: &str, heads: u64, dim: u64, groups: u64, state: u64, columns: u64) -> Self {
        let sections = vec![
            conv(name, "conv.x", &bf16(), heads * dim, heads, columns),
            conv(name, "conv.B", &bf16(), groups * state, groups, columns),
            conv(name, "conv.C", &bf16(), groups * state, groups, columns),
        ];
        let axes = [("head", heads), ("dim", dim), ("state", state)];
        let ssm = State::new(format!("{name}/ssm"), &bf16(), &axes).cut(0, heads);
        let tensors = vec![Tensor::snapshot(sections), Tensor::snapshot(vec![ssm])];
        Self { name: name.to_owned(), tensors }
    }

    /// Gated delta net: one convolution over q|k|v, and a memory by value heads.
    pub fn gdn(
        name: &str,
        key_heads: u64,
        value_heads: u64,
        kd: u64,
        vd: u64,
        columns: u64,
    ) -> Self {
        let sections = vec![
            conv(name, "conv.q", &bf16(), key_heads * kd, key_heads, columns),
            conv(name, "conv.k", &bf16(), key_heads * kd, key_heads, columns),
            conv(name, "conv.v", &bf16(), value_heads * vd, value_heads, columns),
        ];
        let axes = [("head", value_heads), ("value", vd), ("key", kd)];
        let memory = State::new(format!("{name}/memory"), &f32(), &axes).cut(0, value_heads);
        let tensors = vec![Tensor::snapshot(sections), Tensor::snapshot(vec![memory])];
        Self { name: name.to_owned(), tensors }
    }

    /// Kimi delta attention: three convolutions and one memory by heads.
    pub fn kda(name: &str, heads: u64, dim: u64, columns: u64) -> Self {
        let mut tensors: Vec<Tensor> = ["conv.q", "conv.k", "conv.v"]
            .map(|part| conv(name, part, &bf16(), heads * dim, heads, columns))
            .map(|state| Tensor::snapshot(vec![state]))
            .into();
        let axes = [("head", heads), ("value", dim), ("key", dim)];
        let memory = State::new(format!("{name}/memory"), &f32(), &axes).cut(0, heads);
        tensors.push(Tensor::snapshot(vec![memory]));
        Self { name: name.to_owned(), tensors }
    }
}

impl Model {
    /// A random model of one to four layers of any kinds, and perhaps a draft.
    pub fn draw(dice: &mut Dice) -> Self {
        let mut layers = vec![];
        // Some models are uniform, some repeat two kinds, some have a new kind in every layer.
        let count = dice.within(1, 4);
        let palette: Vec<u64> = (0..dice.within(1, 3)).map(|_| dice.any()).collect();
        for index in 0..count {
            let mut same = Dice::new(dice.pick(&palette));
            layers.push(draw_layer(&format!("layers.{index}"), &mut same));
        }
        if dice.chance(25) {
            layers.push(draw_layer("draft.0", dice));
        }
        Self::new(layers)
    }
}

/// A random layer of any kind.
fn draw_layer(name: &str, dice: &mut Dice) -> Layer {
    let sight = match dice.within(0, 5) {
        0 | 1 => Sight::Sliding(dice.within(1, 20)),
        2 => Sight::Chunked(dice.within(1, 12)),
        _ => Sight::Full,
    };
    let columns = dice.within(1, 4);
    let number = dice.pick(&[bf16(), Format::new("f16", 2), f32()]);
    let named = |part: &str| format!("{name}/{part}");
    let tensors = match dice.within(0, 12) {
        0..=2 => {
            let heads = dice.pick(&[1, 2, 3, 4, 5, 6, 8]);
            let dim = dice.within(1, 4);
            let dim_v = if dice.chance(70) { dim } else { dice.within(1, 4) };
            return Layer::attention(name, sight, heads, dim, dim_v);
        }
        // A quantised page: K, V and scales of a head and token in one opaque record.
        3 => {
            let heads = dice.pick(&[1, 2, 3, 4, 6]);
            let record = Format::new("int8_per_token_head", dice.within(3, 11) as u32);
            let kv = State::new(named("kv"), &record, &[("head", heads)]).cut(0, heads);
            vec![Tensor::tokens(sight, vec![kv])]
        }
        // Latents, with or without an indexer of another size, which may be compressed.
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
            let law = Law {
                entries: dice.within(1, 2) as u32,
                tokens: dice.within(1, 5) as u32,
                open: dice.pick(&[0, 0, 1, 2]),
            };
            let heads = dice.within(1, 3);
            let c = State::new(named("c"), &number, &[("head", heads), ("dim", dice.within(1, 3))]);
            vec![Tensor { law, sight, states: vec![c.cut(0, heads)] }]
        }
        // Mamba1.
        7 => {
            let inner = dice.pick(&[2, 4, 6, 9]);
            let axes = [("channel", inner), ("state", dice.within(1, 3))];
            let ssm = State::new(named("ssm"), &f32(), &axes).cut(0, inner);
            let conv = conv(name, "conv", &number, inner, inner, columns);
            vec![Tensor::snapshot(vec![conv]), Tensor::snapshot(vec![ssm])]
        }
        8 => {
            let heads = dice.pick(&[2, 4, 6]);
            let groups = dice.pick(&[1, 1, 2, heads]);
            return Layer::mamba2(
                name,
                heads,
                dice.within(1, 2),
                groups,
                dice.within(1, 3),
                columns,
            );
        }
        9 => {
            let (key_heads, times) = (dice.pick(&[1, 2, 3, 4]), dice.within(1, 3));
            let (kd, vd) = (dice.within(1, 2), dice.within(1, 2));
            return Layer::gdn(name, key_heads, key_heads * times, kd, vd, columns);
        }
        10 => return Layer::kda(name, dice.pick(&[2, 3, 4, 6]), dice.within(1, 2), columns),
        // Short convolution, or linear attention.
        11 => match dice.chance(50) {
            true => {
                let channels = dice.pick(&[2, 3, 4, 6]);
                let conv = conv(name, "conv", &number, channels, channels, columns);
                vec![Tensor::snapshot(vec![conv])]
            }
            false => {
                let heads = dice.pick(&[1, 2, 4]);
                let axes = [("head", heads), ("key", dice.within(1, 3)), ("value", 2)];
                let state = State::new(named("kv"), &f32(), &axes).cut(0, heads);
                vec![Tensor::snapshot(vec![state])]
            }
        },
        // Something that nobody has built yet: any number of tensors of any shape.
        _ => (0..dice.within(1, 3)).map(|tensor| draw_odd(name, tensor, sight, dice)).collect(),
    };
    Layer { name: name.to_owned(), tensors }
}

fn draw_odd(layer: &str, tensor: u64, sight: Sight, dice: &mut Dice) -> Tensor {
    let names = ["a", "b", "c", "d", "e", "f"];
    let count = dice.index(7);
    let lengths: &[u64] = if count > 4 { &[1, 2, 2] } else { &[1, 2, 3] };
    let shape: Vec<(&str, u64)> =
        names[..count].iter().map(|&axis| (axis, dice.pick(lengths))).collect();
    let format = Format::new("odd", dice.within(1, 5) as u32);
    let mut state = State::new(format!("{layer}/odd.{tensor}"), &format, &shape);
    if !shape.is_empty() && dice.chance(70) {
        let axis = dice.index(shape.len());
        state = state.cut(axis, shape[axis].1);
    }
    let law = match dice.within(0, 3) {
        0 => Law { entries: 0, tokens: 1, open: dice.within(1, 3) as u32 },
        1 => Law { entries: 3, tokens: 2, open: dice.within(0, 1) as u32 },
        _ => Law::PER_TOKEN,
    };
    Tensor { law, sight: if law.entries > 0 { sight } else { Sight::Full }, states: vec![state] }
}
