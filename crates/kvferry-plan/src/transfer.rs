//! One request, checked, and what is read for it.

use kvferry_layout::{Loops, LoopsError};

use crate::compile::{Plan, Unwritten};
use crate::loops::{ByShape, loops_over};
use crate::request::{Request, RequestError};
use crate::summary::{Area, Summary};
use crate::walk::{BlockLayout, Entries, Segments, walk_own_blocks, walk_rest};

/// A request that a plan has checked: yields its loops, any number of times.
#[derive(Clone, Debug)]
pub struct Transfer<'p> {
    pub(crate) plan: &'p Plan,
    /// For every pairing of the plan.
    pub(crate) segments: Vec<ByShape>,
    /// For everything that may be left unwritten.
    rest: Vec<ByShape>,
}

impl Plan {
    /// Checks a request and walks its tables, in time proportional to its blocks.
    pub fn transfer(&self, request: &Request<'_>) -> Result<Transfer<'_>, RequestError> {
        self.check(request)?;
        let entries = |law, layout: &BlockLayout| {
            Entries::new(law, &layout.window, request.tokens, request.cached[layout.group])
        };
        let mut segments = Vec::with_capacity(self.pairings.len());
        for pairing in &self.pairings {
            let group = pairing.destination.group;
            let Entries { first, end, .. } = entries(pairing.law, &pairing.destination);
            let tables = (&request.source[pairing.source.group], &request.destination[group]);
            segments.push(pairing.walk(first, end, tables)?.by_shape());
        }
        let mut rest = Vec::with_capacity(self.unwritten.len());
        for unwritten in &self.unwritten {
            let mut left = Segments::default();
            match unwritten {
                _ if request.tokens == 0 => {}
                Unwritten::Entries(law, layout) => {
                    let table = &request.destination[layout.group];
                    walk_rest(layout, &entries(*law, layout), table, &mut left)?;
                }
                Unwritten::Blocks { group } => {
                    let facts = &self.groups[*group];
                    let first_own = facts.layouts.iter().map(|(law, layout)| {
                        let held = entries(*law, layout).held;
                        layout.phase.local(held) / layout.entries
                    });
                    let first_own = first_own.min().unwrap_or(u64::MAX);
                    let table = &request.destination[*group];
                    walk_own_blocks(first_own, facts.null_block, table, &mut left);
                }
            }
            rest.push(left.by_shape());
        }
        Ok(Transfer { plan: self, segments, rest })
    }
}

impl Transfer<'_> {
    /// What is read from one source rank (by its index in the list that the plan was compiled from), as loops
    /// over tables of blocks: in time and space proportional to the request's blocks, however many copies they
    /// make. An error, which a proven plan does not have, is that of a nest that is not sound: without it bytes
    /// would be missing.
    pub fn loops(&self, source: usize) -> Result<Loops, LoopsError> {
        let nests = self.plan.sources.get(source).map_or(&[][..], |nests| nests);
        loops_over(nests, &self.segments)
    }

    /// What is read from one source rank amounts to, run by run.
    pub fn summary(&self, source: usize) -> Result<Summary, LoopsError> {
        Ok(Summary::of(&self.loops(source)?))
    }

    /// What is left of the request's own destination blocks: the bytes of their pieces that nothing is read into
    /// and no cached token holds, and their scratch. For engines that want it zeroed.
    pub fn rest(&self) -> Result<Vec<Area>, LoopsError> {
        let rest = loops_over(&self.plan.rest, &self.rest)?;
        let area =
            |run: kvferry_layout::ByteCopy| Area { address: run.destination, bytes: run.bytes };
        Ok(rest.copies().map(area).collect())
    }
}
