//! One request, and the copies that serve it.

use kvferry_layout::ByteCopy;

use crate::compile::{Plan, Unwritten};
use crate::cursor::Cursor;
use crate::request::{Request, RequestError};
use crate::summary::{Area, Summary};
use crate::walk::{BlockLayout, Entries, Segments, walk_own_blocks, walk_rest};

/// A request that a plan has checked: yields its copies, any number of times.
#[derive(Clone, Debug)]
pub struct Transfer<'p> {
    pub(crate) plan: &'p Plan,
    /// For every pairing of the plan.
    pub(crate) segments: Segments,
    /// For everything that may be left unwritten.
    rest: Segments,
}

impl Plan {
    /// Checks a request and prepares its copies, in time proportional to its blocks.
    pub fn transfer(&self, request: &Request<'_>) -> Result<Transfer<'_>, RequestError> {
        self.check(request)?;
        let entries = |law, layout: &BlockLayout| {
            Entries::new(law, &layout.window, request.tokens, request.cached[layout.group])
        };
        let mut segments = Segments::new();
        for pairing in &self.pairings {
            let group = pairing.destination.group;
            let Entries { first, end, .. } = entries(pairing.law, &pairing.destination);
            let tables = (&request.source[pairing.source.group], &request.destination[group]);
            pairing.walk(first, end, tables, &mut segments)?;
            segments.end();
        }
        let mut rest = Segments::default();
        for unwritten in &self.unwritten {
            match unwritten {
                _ if request.tokens == 0 => {}
                Unwritten::Entries(law, layout) => {
                    let table = &request.destination[layout.group];
                    walk_rest(layout, &entries(*law, layout), table, &mut rest)?;
                }
                Unwritten::Blocks { group } => {
                    let facts = &self.groups[*group];
                    let first_own = facts.layouts.iter().map(|(law, layout)| {
                        let held = entries(*law, layout).held;
                        layout.phase.local(held) / layout.entries
                    });
                    let first_own = first_own.min().unwrap_or(u64::MAX);
                    let table = &request.destination[*group];
                    walk_own_blocks(first_own, facts.null_block, table, &mut rest);
                }
            }
            rest.end();
        }
        Ok(Transfer { plan: self, segments, rest })
    }
}

impl<'p> Transfer<'p> {
    /// The copies from one source rank (by its index in the list that the plan was compiled from), in
    /// the order of the destination's groups and, within one, of addresses and block tables. No two
    /// that follow each other touch on both sides: such are one copy.
    pub fn copies(&self, source: usize) -> Copies<'_> {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        Copies { cursor: Cursor::new(clusters, &self.segments) }
    }

    /// What the copies from one source rank amount to, without yielding them: takes time in
    /// proportion to the request's blocks.
    pub fn summary(&self, source: usize) -> Summary {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        Cursor::new(clusters, &self.segments).summary()
    }

    /// What is left of the request's own destination blocks: the bytes of their pieces that no copy
    /// writes and no cached token holds, and their scratch. For engines that want it zeroed.
    pub fn rest(&self) -> Rest<'_> {
        Rest { cursor: Cursor::new(&self.plan.rest, &self.rest) }
    }
}

/// The copies of a request from one source rank. See [`Transfer::copies`].
#[derive(Clone, Debug)]
pub struct Copies<'t> {
    pub(crate) cursor: Cursor<'t>,
}

impl Copies<'_> {
    /// Writes the next copies into `buffer` and returns how many; fewer than fit only at the end.
    /// Allocates nothing per copy.
    pub fn fill(&mut self, buffer: &mut [ByteCopy]) -> usize {
        self.cursor.fill(buffer)
    }
}

impl Iterator for Copies<'_> {
    type Item = ByteCopy;

    fn next(&mut self) -> Option<ByteCopy> {
        let mut next = [ByteCopy::default()];
        (self.cursor.fill(&mut next) == 1).then_some(next[0])
    }
}

/// What is left of a request's own blocks. See [`Transfer::rest`].
#[derive(Clone, Debug)]
pub struct Rest<'t> {
    cursor: Cursor<'t>,
}

impl Iterator for Rest<'_> {
    type Item = Area;

    fn next(&mut self) -> Option<Area> {
        let mut next = [ByteCopy::default()];
        let found = self.cursor.fill(&mut next) == 1;
        found.then_some(Area { address: next[0].destination, bytes: next[0].bytes })
    }
}
