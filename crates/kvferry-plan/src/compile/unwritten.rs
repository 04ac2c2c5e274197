//! What a request leaves of its own blocks, as nests from the destination to itself.

use kvferry_layout::{Law, Manifest, Window};

use crate::compile::interner::Interner;
use crate::compile::merge::Key;
use crate::nest::{BothSteps, Loop, Nest, Steps};
use crate::walk::BlockLayout;

/// What is left of a destination group's blocks once a request is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unwritten {
    /// Entries of a piece that are neither copied nor held already.
    Entries(Law, BlockLayout),
    /// All of a group's blocks that hold any such entry.
    Blocks { group: usize },
}

/// The destination's own pieces and scratch as nests from it to itself.
pub(crate) fn unwritten(
    destination: &Manifest,
    windows: &[Vec<Window>],
) -> (Vec<Unwritten>, Vec<(Key, Nest)>) {
    let mut unwritten = Interner::default();
    let mut nests = vec![];
    for (index, group) in destination.groups().iter().enumerate() {
        let both = |count, stride| Loop { count, source: stride, destination: stride };
        let mut add = |pairing, (region, offset): (u32, u64), steps: Steps, run, loops| {
            let start = destination.regions()[region as usize].base + offset;
            let (regions, blocks) = ((region, region), (steps.block, steps.block));
            let steps = BothSteps { source: steps, destination: steps };
            let nest = Nest::new((start, start), steps, run, loops);
            nests.push((Key { group: index, pairing, regions, blocks, layer: 0 }, nest));
        };
        for (number, piece) in group.pieces.iter().enumerate() {
            let (held, steps) =
                BlockLayout::new(destination, (index, number), windows[index][number]);
            let (kind, view) = (destination.kind(piece), &piece.view);
            let pairing = unwritten.number(Unwritten::Entries(kind.law, held));
            let loops = piece.bounds.0.iter().zip(&view.axes);
            let loops = loops.map(|(span, &stride)| both(span.len(), stride)).collect();
            add(pairing, (view.region, view.offset), steps, kind.format.bytes.into(), loops);
        }
        for scratch in &group.scratch {
            let pairing = unwritten.number(Unwritten::Blocks { group: index });
            let loops = scratch.dims.iter().map(|&(count, stride)| both(count, stride)).collect();
            let steps = Steps { block: scratch.block, ..Steps::default() };
            add(pairing, (scratch.region, scratch.offset), steps, scratch.run, loops);
        }
    }
    (unwritten.list, nests)
}
