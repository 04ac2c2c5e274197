//! How what is read from one source is carried out. The choice is made here, for each source by what
//! its transport takes.

use kvferry_plan::{Plan, Request, RequestError, Table, Transfer};
use kvferry_transport::{ByteCopy, Loops, Price};

use crate::carrier::Source;
use crate::worker::load::Portion;

/// A way to carry out a plan's part for one source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lowering {
    /// The bytes that are needed and no others, as a list of copies.
    Direct,
    /// The same bytes, as loops over the tables of blocks: the source's transport walks them itself, and
    /// no list of copies is made. Copies cost it next to nothing, so it never reads too much.
    Loops,
    /// The bytes that are needed as a list, but the last blocks may be read whole where that takes fewer copies and is cheaper.
    OverRead(Price),
}

impl Lowering {
    fn choose(load: &Portion, source: &dyn Source) -> Self {
        if source.executes_loops() {
            return Self::Loops;
        }
        // What is read beyond the request's end lands in the rest, which must then be zeroed.
        match load.rest {
            true => Self::OverRead(source.price()),
            false => Self::Direct,
        }
    }

    /// The price by which it reads more than is needed.
    fn over_read(self) -> Option<Price> {
        match self {
            Self::OverRead(price) => Some(price),
            Self::Direct | Self::Loops => None,
        }
    }
}

/// What is read from one source, as its transport wants it.
#[derive(Clone, Debug)]
pub(super) enum Reads {
    List(Vec<ByteCopy>),
    Loops(Loops),
}

impl Reads {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::List(copies) => copies.iter().map(|copy| copy.bytes).sum(),
            Self::Loops(loops) => loops.bytes(),
        }
    }

    /// How many copies it is, or would be.
    pub(super) fn copies(&self) -> u64 {
        match self {
            Self::List(copies) => copies.len() as u64,
            Self::Loops(loops) => loops.runs(),
        }
    }
}

/// A request against a plan, with the lowering of each source.
#[derive(Debug)]
pub(super) struct Lowered<'p> {
    /// For each source, how it is read and by which of the transfers.
    chosen: Vec<(Lowering, usize)>,
    /// At least one. With a price, the last blocks may be read whole; without, nothing is read too much.
    transfers: Vec<(Option<Price>, Transfer<'p>)>,
    /// By which the rest is told, where that is none of those.
    own: Option<Transfer<'p>>,
}

impl<'p> Lowered<'p> {
    /// Checks the request and chooses a lowering for each source. `None` is a source that nothing is
    /// read from.
    pub(super) fn new(
        plan: &'p Plan,
        load: &Portion,
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
        let mut transfers: Vec<(Option<Price>, Transfer<'p>)> = vec![];
        let mut prepare = |lowering: Lowering| {
            let price = lowering.over_read();
            if let Some(known) = transfers.iter().position(|(other, _)| *other == price) {
                return Ok((lowering, known));
            }
            let transfer = match &price {
                None => plan.transfer(&request)?,
                Some(price) => plan.over_read(&request, price)?,
            };
            transfers.push((price, transfer));
            Ok((lowering, transfers.len() - 1))
        };
        let lowering = |source: &Option<Box<dyn Source>>| {
            source.as_deref().map_or(Lowering::Direct, |source| Lowering::choose(load, source))
        };
        let chosen = sources.iter().map(|source| prepare(lowering(source)));
        let chosen: Vec<(Lowering, usize)> = chosen.collect::<Result<_, _>>()?;
        if chosen.is_empty() {
            prepare(Lowering::Direct)?;
        }
        let own = match load.rest && load.cached != load.before {
            // Blocks that were filled before are the request's own, too.
            true => Some(plan.transfer(&Request { cached: &load.before, ..request })?),
            false => None,
        };
        Ok(Self { chosen, transfers, own })
    }

    /// What is read from one source.
    pub(super) fn reads(&self, source: usize) -> Reads {
        let (lowering, transfer) = self.chosen[source];
        let (_, transfer) = &self.transfers[transfer];
        if lowering == Lowering::Loops {
            return Reads::Loops(transfer.loops(source));
        }
        let mut copies = vec![ByteCopy::default(); transfer.summary(source).copies as usize];
        let filled = transfer.copies(source).fill(&mut copies);
        debug_assert_eq!(filled, copies.len(), "a summary counts what is yielded");
        Reads::List(copies)
    }

    /// What is left of the request's own blocks: the same, whatever was chosen.
    pub(super) fn rest(&self) -> Vec<kvferry_plan::Area> {
        let read = self.transfers.first().map(|(_, transfer)| transfer);
        let transfer = self.own.as_ref().or(read);
        transfer.map_or_else(Vec::new, |transfer| transfer.rest().collect())
    }
}
