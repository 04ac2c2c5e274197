//! How what is read from one source is carried out. The choice is made here, for each source and group
//! by what its transport takes.

use kvferry_plan::cost::{self, Choice, Way};
use kvferry_plan::{LoopsError, Plan, Request, RequestError, Table, Transfer};
use kvferry_transport::{ByteCopy, Loops};

use crate::carrier::Source;
use crate::worker::load::{Lowerings, Portion};

/// What is read from one source in one go, as its transport wants it.
#[derive(Clone, Debug)]
pub(super) enum Reads {
    /// Every copy by itself.
    List(Vec<ByteCopy>),
    /// Loops that the transport walks itself.
    Loops(Loops),
    /// Loops that the source gathers and the transport scatters.
    Packed(Loops),
}

impl Reads {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::List(copies) => copies.iter().map(|copy| copy.bytes).sum(),
            Self::Loops(loops) | Self::Packed(loops) => loops.bytes(),
        }
    }

    /// How many copies it is, or would be.
    pub(super) fn copies(&self) -> u64 {
        match self {
            Self::List(copies) => copies.len() as u64,
            Self::Loops(loops) | Self::Packed(loops) => loops.runs(),
        }
    }
}

/// How one source is read.
#[derive(Clone, Debug)]
enum Lowering {
    Loops,
    /// The way of every group.
    ByGroup(Vec<Way>),
}

/// A request against a plan, with the lowering of each source.
#[derive(Debug)]
pub(super) struct Lowered<'p> {
    /// For each source; `None` where nothing is read from it.
    chosen: Vec<Option<Lowering>>,
    transfer: Transfer<'p>,
    /// By which the rest is told, where that is another one.
    own: Option<Transfer<'p>>,
}

impl<'p> Lowered<'p> {
    /// Checks the request and chooses a lowering for each source. `None` is a source that nothing is
    /// read from.
    pub(super) fn new(
        plan: &'p Plan,
        load: &Portion,
        sources: &[Option<Box<dyn Source>>],
        choice: Choice,
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
        let transfer = plan.transfer(&request)?;
        let lowering = |(index, source): (usize, &dyn Source)| {
            if source.executes_loops() {
                return Lowering::Loops;
            }
            let groups = 0..transfer.groups();
            let groups: Vec<_> = groups.map(|group| transfer.summary_of(index, group)).collect();
            Lowering::ByGroup(cost::choose(&source.rates(), &groups, choice))
        };
        let chosen = sources.iter().enumerate();
        let chosen = chosen.map(|(index, source)| Some(lowering((index, source.as_deref()?))));
        let chosen = chosen.collect();
        let own = match load.rest && load.cached != load.before {
            // Blocks that were filled before are the request's own, too.
            true => Some(plan.transfer(&Request { cached: &load.before, ..request })?),
            false => None,
        };
        Ok(Self { chosen, transfer, own })
    }

    /// What is read from one source: nothing, or one thing or two.
    pub(super) fn reads(&self, source: usize) -> Result<Vec<Reads>, LoopsError> {
        let Self { transfer, .. } = self;
        let mut reads = vec![];
        match self.chosen.get(source) {
            Some(Some(Lowering::Loops)) => reads.push(Reads::Loops(transfer.loops(source)?)),
            Some(Some(Lowering::ByGroup(ways))) => {
                let mut copies = vec![];
                let direct = ways.iter().enumerate().filter(|(_, way)| **way == Way::Direct);
                for (group, _) in direct {
                    let filled = copies.len();
                    let more = transfer.summary_of(source, group).copies as usize;
                    copies.resize(filled + more, ByteCopy::default());
                    let written = transfer.copies_of(source, group).fill(&mut copies[filled..]);
                    debug_assert_eq!(written, more, "a summary counts what is yielded");
                }
                reads.push(Reads::List(copies));
                let packed = |group: usize| ways[group] == Way::Packed;
                if (0..ways.len()).any(packed) {
                    reads.push(Reads::Packed(transfer.loops_of(source, packed)?));
                }
            }
            // Nothing should be read from it. If the plan says otherwise, that is an error to be told.
            Some(None) | None => reads.push(Reads::List(transfer.copies(source).collect())),
        }
        reads.retain(|reads| reads.copies() > 0);
        Ok(reads)
    }

    /// How one source is read.
    pub(super) fn lowerings(&self, source: usize) -> Lowerings {
        let mut used = Lowerings::default();
        match self.chosen.get(source) {
            Some(Some(Lowering::Loops)) => used.add(None),
            Some(Some(Lowering::ByGroup(ways))) => {
                let read = |group| self.transfer.summary_of(source, group).copies > 0;
                let ways = ways.iter().enumerate().filter(|(group, _)| read(*group));
                ways.for_each(|(_, way)| used.add(Some(*way)));
            }
            Some(None) | None => {}
        }
        used
    }

    /// What is left of the request's own blocks: the same, whatever was chosen.
    pub(super) fn rest(&self) -> Vec<kvferry_plan::Area> {
        self.own.as_ref().unwrap_or(&self.transfer).rest().collect()
    }
}
