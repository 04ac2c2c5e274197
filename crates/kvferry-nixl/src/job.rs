//! How copies are put to NIXL: on prepared lists, where they allow it and are many, or one by one.

use std::ffi::c_int;

use kvferry_layout::{ByteCopy, Place};

use super::capi::Span;
use super::grid::Grid;
use kvferry_transport::shared::spans::Spans;

/// Below this many copies, single descriptors cost next to nothing.
const FEW: usize = 64;

#[derive(Debug)]
pub(super) enum Job {
    /// Entries of two grids.
    OnGrids { ours: (Grid, Vec<c_int>), theirs: (Grid, Vec<c_int>) },
    /// Single copies (ours, theirs), in groups of the same kinds of memory.
    OneByOne(Vec<Vec<(Span, Span)>>),
}

impl Job {
    /// `merged` are the `runs` after merging: grids are looked for before, because equal copies
    /// are only equal then.
    pub(super) fn new(
        runs: impl Iterator<Item = ByteCopy>,
        merged: &[ByteCopy],
        ours: &Spans,
        theirs: &Spans,
    ) -> Self {
        if merged.len() > FEW {
            let runs: Vec<ByteCopy> = runs.collect();
            if let Some(our_grid) = Grid::of(&runs, |run| run.destination, ours)
                && let Some(their_grid) = Grid::of(&runs, |run| run.source, theirs)
            {
                return Self::OnGrids { ours: our_grid, theirs: their_grid };
            }
        }
        let place = |spans: &Spans, address, bytes, hint: &mut usize| {
            *hint = spans.find(address, bytes, *hint).unwrap_or(usize::MAX);
            let region = spans.0.get(*hint);
            region.map_or(Place::Host, |region| region.place)
        };
        let (mut our_hint, mut their_hint) = (usize::MAX, usize::MAX);
        // A request's descriptors are of one kind of memory on each side.
        type Group = ((bool, bool), Vec<(Span, Span)>);
        let mut groups: Vec<Group> = Vec::new();
        for &ByteCopy { source, destination, bytes } in merged {
            let here = (destination, bytes, place(ours, destination, bytes, &mut our_hint));
            let there = (source, bytes, place(theirs, source, bytes, &mut their_hint));
            let kinds = (here.2 == Place::Host, there.2 == Place::Host);
            match groups.iter_mut().find(|(known, _)| *known == kinds) {
                Some((_, group)) => group.push((here, there)),
                None => groups.push((kinds, vec![(here, there)])),
            }
        }
        Self::OneByOne(groups.into_iter().map(|(_, group)| group).collect())
    }
}
