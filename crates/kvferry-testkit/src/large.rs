//! Large manifests at real sizes, too large for the judge but not for a test of memory.

use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Phase, Piece, Place, Region, StateBox, View, Window,
};

/// 100 layers of a hybrid at real sizes: three Mamba2 layers for each attention layer, four groups over
/// 25 shared tensors.
pub fn hundred_layers(blocks: u32) -> Draft {
    let format = |name: &str, bytes| Format::new(name, bytes);
    let kind = |format, axes: &[(&str, u64)], law| Kind {
        format,
        axes: axes.iter().map(|&(name, length)| Axis::new(name, length)).collect(),
        law,
    };
    let bf16 = || format("bf16", 2);
    let kinds = vec![
        kind(bf16(), &[("head", 8), ("dim", 128)], Law::PER_TOKEN),
        kind(bf16(), &[("channel", 6144), ("column", 3)], Law::SNAPSHOT),
        kind(bf16(), &[("channel", 1024), ("column", 3)], Law::SNAPSHOT),
        kind(format("f32", 4), &[("head", 96), ("dim", 64), ("state", 128)], Law::SNAPSHOT),
    ];
    let page = 4 << 20;
    let piece = |state: String, kind: u32, region: u32, offset, entry, axes: &[u64]| {
        let shape = [(0..8, 0..128), (0..6144, 0..3), (0..1024, 0..3)];
        let bounds = match shape.get(kind as usize) {
            Some((first, second)) => StateBox::new([first.clone(), second.clone()]),
            None => StateBox::new([0..96, 0..64, 0..128]),
        };
        let view = View { region, offset, block: page, kernel: None, entry, axes: axes.to_vec() };
        Piece { state, kind, bounds, phase: Phase::ALL, need: None, view }
    };
    let mut groups = vec![];
    for group in 0..4 {
        let mut pieces = vec![];
        for region in 0..25u32 {
            let layer = format!("model.layers.{}", region * 4 + group);
            if group == 3 {
                pieces.push(piece(format!("{layer}/k"), 0, region, 0, 4096, &[512, 2]));
                pieces.push(piece(format!("{layer}/v"), 0, region, 256, 4096, &[512, 2]));
                continue;
            }
            let mut offset = 0;
            for (section, kind, channels) in [("x", 1, 6144), ("B", 2, 1024), ("C", 2, 1024)] {
                let state = format!("{layer}/conv.{section}");
                pieces.push(piece(state, kind, region, offset, 0, &[6, 2]));
                offset += channels * 6;
            }
            let axes = [32768, 512, 4];
            pieces.push(piece(format!("{layer}/ssm"), 3, region, offset, 0, &axes));
        }
        groups.push(Group {
            name: format!("group {group}"),
            blocks,
            null_block: Some(0),
            tokens_per_block: (group == 3).then_some(1024),
            window: Window::FULL,
            pieces,
            scratch: vec![],
        });
    }
    let bytes = u64::from(blocks) * page;
    let region =
        |index: u64| Region { base: 0x7f00_0000_0000 + index * bytes, bytes, place: Place::Gpu(0) };
    Draft {
        identity: [("model".to_owned(), "a hundred layers".to_owned())].into(),
        engine: "prefill-0".to_owned(),
        rank: 3,
        label: "tp3".to_owned(),
        regions: (0..25).map(region).collect(),
        kinds,
        writers: Default::default(),
        groups,
    }
}
