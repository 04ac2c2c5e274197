//! Large real geometries, laid out as vLLM 0.32 lays them out: every group starts at byte 0 of one
//! allocation, layer i of every group shares its pages, state pages are padded to the attention page.

use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Place, Region, StateBox, View,
    Window,
};

/// A state of one layer: what it is, and how many indivisible units split it over ranks (one for a
/// state that every rank holds whole).
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) units: u64,
}

/// A model: its layers by kind of memory, in order.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) attention: Vec<State>,
    pub(crate) recurrent: Vec<State>,
    /// For every layer: whether it is an attention layer, a recurrent one, or neither.
    pub(crate) layers: Vec<Option<bool>>,
    /// Tokens in a block, by tensor-parallel size.
    pub(crate) block: fn(u64) -> u64,
}

fn kind(format: &str, bytes: u32, axes: &[(&str, u64)], law: Law) -> Kind {
    let axes = axes.iter().map(|(name, length)| Axis::new(*name, *length)).collect();
    Kind { format: Format::new(format, bytes), axes, law }
}

fn heads(count: u64, dim: u64) -> Vec<State> {
    let kind = kind("bf16", 2, &[("head", count), ("dim", dim)], Law::PER_TOKEN);
    ["k", "v"].map(|name| State { name, kind: kind.clone(), units: count }).to_vec()
}

/// 80 layers of 8 heads (Llama 3.1 70B).
pub(crate) fn dense() -> Model {
    Model {
        name: "llama-3.1-70b",
        attention: heads(8, 128),
        recurrent: vec![],
        layers: vec![Some(true); 80],
        block: |_| 16,
    }
}

/// 52 layers: 4 of attention, 24 of Mamba2, the rest without memory (Nemotron-H 8B).
pub(crate) fn nemotron_h() -> Model {
    let state =
        |name, axes: &[_], units| State { name, kind: kind("f32", 4, axes, Law::SNAPSHOT), units };
    let mut layers = vec![None; 52];
    for (index, layer) in layers.iter_mut().enumerate() {
        *layer = match index {
            7 | 18 | 29 | 40 => Some(true),
            _ if index % 2 == 0 && index < 48 => Some(false),
            _ => None,
        };
    }
    Model {
        name: "nemotron-h-8b",
        attention: heads(8, 128),
        recurrent: vec![
            state("conv.x", &[("column", 3), ("channel", 128 * 64)], 128),
            state("conv.b", &[("column", 3), ("channel", 8 * 128)], 8),
            state("conv.c", &[("column", 3), ("channel", 8 * 128)], 8),
            state("ssm", &[("head", 128), ("dim", 64), ("state", 128)], 128),
        ],
        layers,
        block: |_| 2112,
    }
}

/// 27 layers: 20 of KDA, 7 of MLA (Kimi-Linear 48B).
pub(crate) fn kimi_linear() -> Model {
    let conv = |name| State {
        name,
        kind: kind("bf16", 2, &[("column", 3), ("channel", 32 * 128)], Law::SNAPSHOT),
        units: 32,
    };
    let latent = kind("bf16", 2, &[("content", 576)], Law::PER_TOKEN);
    let axes = [("head", 32), ("value", 128), ("key", 128)];
    Model {
        name: "kimi-linear-48b",
        attention: vec![State { name: "latent", kind: latent, units: 1 }],
        recurrent: vec![
            conv("conv.q"),
            conv("conv.k"),
            conv("conv.v"),
            State { name: "ssm", kind: kind("f32", 4, &axes, Law::SNAPSHOT), units: 32 },
        ],
        layers: (1..=27).map(|layer| Some(layer % 4 == 0 || layer == 27)).collect(),
        block: |tp| match tp {
            1 => 1920,
            2 => 1024,
            _ => 512,
        },
    }
}

/// The manifest of one rank of a model.
pub(crate) fn manifest(model: &Model, (tp, pp): (u64, u64), rank: u64, blocks: u32) -> Manifest {
    let (stage, shard) = (rank / tp, rank % tp);
    let share = |state: &State| {
        let first = shard * state.units / tp;
        let (first, count) = (first, (state.units / tp).max(1));
        let axis = state.kind.axes.iter().position(|axis| {
            axis.length % state.units == 0 && axis.name != "column" && state.units > 1
        });
        let mut bounds = StateBox::whole(&state.kind.axes);
        if let Some(axis) = axis {
            let unit = state.kind.axes[axis].length / state.units;
            bounds.0[axis] = (first * unit..(first + count) * unit).into();
        }
        bounds
    };
    let tokens = (model.block)(tp);
    let bytes = |state: &State| share(state).volume() * u64::from(state.kind.format.bytes);
    let content: u64 = model.attention.iter().map(bytes).sum();
    let page = tokens * content;
    let mut draft = Draft {
        identity: [("model".to_owned(), model.name.to_owned())].into(),
        engine: format!("tp{tp} pp{pp}"),
        rank: rank as u32,
        label: format!("pp{stage} tp{shard}"),
        ..Draft::default()
    };
    // Groups of one size, filled with every n-th layer; a stage keeps its own layers of each.
    let of_kind = |wanted| {
        let layers = (0..model.layers.len()).filter(move |&l| model.layers[l] == Some(wanted));
        layers.collect::<Vec<_>>()
    };
    let (attention, recurrent) = (of_kind(true), of_kind(false));
    let size =
        if recurrent.is_empty() { attention.len() } else { attention.len().min(recurrent.len()) };
    let per_stage = model.layers.len().div_ceil(pp as usize);
    let mut widest = 0;
    for (is_attention, layers) in [(true, attention), (false, recurrent)] {
        let count = layers.len().div_ceil(size.max(1));
        for number in 0..count {
            let mine = layers.iter().skip(number).step_by(count);
            let mine: Vec<_> =
                mine.filter(|&&layer| layer / per_stage == stage as usize).copied().collect();
            widest = widest.max(mine.len());
            let mut pieces = vec![];
            for (place, layer) in mine.iter().enumerate() {
                let base = place as u64 * page * u64::from(blocks);
                let states = if is_attention { &model.attention } else { &model.recurrent };
                let mut offset = 0;
                for state in states {
                    let bounds = share(state);
                    let element = u64::from(state.kind.format.bytes);
                    let mut axes = vec![0; bounds.0.len()];
                    let mut stride = element;
                    for (axis, span) in bounds.0.iter().enumerate().rev() {
                        axes[axis] = stride;
                        stride *= span.len();
                    }
                    let (entry, here) = if is_attention {
                        // [head, token, K|V content]: heads are a whole page apart.
                        let row: u64 = model
                            .attention
                            .iter()
                            .map(|other| {
                                let bounds = share(other);
                                bounds.0.last().map_or(1, kvferry_layout::Span::len) * element
                            })
                            .sum();
                        if axes.len() > 1 {
                            axes[0] = tokens * row;
                        }
                        let here = offset;
                        offset += bounds.0.last().map_or(1, kvferry_layout::Span::len) * element;
                        (row, here)
                    } else {
                        let here = offset;
                        offset += stride;
                        (0, here)
                    };
                    let kind = draft.kinds.iter().position(|kind| *kind == state.kind);
                    let kind = kind.unwrap_or_else(|| {
                        draft.kinds.push(state.kind.clone());
                        draft.kinds.len() - 1
                    });
                    pieces.push(Piece {
                        state: format!("layers.{layer}/{}", state.name),
                        kind: kind as u32,
                        bounds,
                        phase: Phase::ALL,
                        view: View {
                            region: 0,
                            offset: base + here,
                            block: page,
                            kernel: None,
                            entry,
                            axes,
                        },
                    });
                }
                assert!(offset <= page, "{}: a state page does not fit", model.name);
            }
            draft.groups.push(Group {
                name: format!("group {}", draft.groups.len()),
                blocks,
                null_block: Some(0),
                tokens_per_block: is_attention.then_some(tokens),
                window: Window::FULL,
                pieces,
                scratch: vec![],
            });
        }
    }
    let bytes = (widest as u64 * page * u64::from(blocks)).max(1);
    draft.regions.push(Region { base: 1 << 40, bytes, place: Place::Host });
    Manifest::new(draft).unwrap_or_else(|error| panic!("{}: {error}", model.name))
}
