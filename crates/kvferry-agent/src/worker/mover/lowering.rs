//! How what is read from one source is carried out. The choice is made here, for each source by what
//! its transport takes.

use kvferry_plan::{Plan, Request, RequestError, Table, Transfer};
use kvferry_transport::{ByteCopy, Price};

use crate::carrier::Source;
use crate::worker::load::Load;

/// A way to carry out a plan's part for one source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lowering {
    /// The bytes that are needed and no others, as a list of copies.
    Direct,
    /// The same, but the last blocks may be read whole where that takes fewer copies and is cheaper.
    OverRead(Price),
}

impl Lowering {
    fn choose(load: &Load, source: &dyn Source) -> Self {
        // What is read beyond the request's end lands in the rest, which must then be zeroed.
        match load.rest {
            true => Self::OverRead(source.price()),
            false => Self::Direct,
        }
    }
}

/// A request against a plan, with the lowering of each source.
#[derive(Debug)]
pub(super) struct Lowered<'p> {
    /// For each source, which of the transfers its copies come from.
    chosen: Vec<usize>,
    /// One for each lowering that was chosen, at least one.
    transfers: Vec<(Lowering, Transfer<'p>)>,
}

impl<'p> Lowered<'p> {
    /// Checks the request and chooses a lowering for each source. `None` is a source that nothing is
    /// read from.
    pub(super) fn new(
        plan: &'p Plan,
        load: &Load,
        sources: &[Option<Box<dyn Source>>],
    ) -> Result<Self, RequestError> {
        let source: Vec<Table<'_>> = load.grant.tables.iter().map(|table| table.borrow()).collect();
        let destination: Vec<Table<'_>> =
            load.destination.iter().map(|table| table.borrow()).collect();
        let request = Request {
            tokens: load.tokens,
            cached: &load.cached,
            source: &source,
            destination: &destination,
        };
        let mut transfers: Vec<(Lowering, Transfer<'p>)> = vec![];
        let mut prepare = |lowering: Lowering| {
            if let Some(known) = transfers.iter().position(|(other, _)| *other == lowering) {
                return Ok(known);
            }
            let transfer = match &lowering {
                Lowering::Direct => plan.transfer(&request)?,
                Lowering::OverRead(price) => plan.over_read(&request, price)?,
            };
            transfers.push((lowering, transfer));
            Ok(transfers.len() - 1)
        };
        let lowering = |source: &Option<Box<dyn Source>>| {
            source.as_deref().map_or(Lowering::Direct, |source| Lowering::choose(load, source))
        };
        let chosen = sources.iter().map(|source| prepare(lowering(source)));
        let chosen: Vec<usize> = chosen.collect::<Result<_, _>>()?;
        if chosen.is_empty() {
            prepare(Lowering::Direct)?;
        }
        Ok(Self { chosen, transfers })
    }

    /// The copies from one source.
    pub(super) fn copies(&self, source: usize) -> Vec<ByteCopy> {
        let (_, transfer) = &self.transfers[self.chosen[source]];
        let mut copies = vec![ByteCopy::default(); transfer.summary(source).copies as usize];
        let filled = transfer.copies(source).fill(&mut copies);
        debug_assert_eq!(filled, copies.len(), "a summary counts what is yielded");
        copies
    }

    /// What is left of the request's own blocks: the same, whatever was chosen.
    pub(super) fn rest(&self) -> Vec<kvferry_plan::Area> {
        self.transfers.first().map_or_else(Vec::new, |(_, transfer)| transfer.rest().collect())
    }
}
