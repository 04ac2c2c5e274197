//! How what is read from one source is carried out. The choice is made here, for each source and group
//! by what its transport takes.

use kvferry_plan::cost::{self, Choice, Way, Work};
use kvferry_plan::{LoopsError, Plan, Request, RequestError, Table, Transfer};
use kvferry_transport::{ByteCopy, Loops, Price, Rates};

use crate::carrier::Source;
use crate::worker::load::{Lowerings, Portion};

/// What is read from one source in one go, as its transport wants it.
#[derive(Clone, Debug)]
pub(super) enum Reads {
    /// Every copy by itself; of those, some may bring more than is needed.
    List(Vec<ByteCopy>),
    /// Loops that the transport walks itself. Copies cost it next to nothing, so it never reads too
    /// much.
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

    /// The way that it is read.
    pub(super) fn way(&self) -> Way {
        match self {
            Self::List(_) | Self::Loops(_) => Way::Direct,
            Self::Packed(_) => Way::Packed,
        }
    }
}

/// How one source is read.
#[derive(Clone, Debug)]
enum Lowering {
    Loops,
    /// The way of every group, and the transfer that over-reads, where one does.
    ByGroup(Vec<Way>, usize),
}

/// A request against a plan, with the lowering of each source.
#[derive(Debug)]
pub(super) struct Lowered<'p> {
    /// For each source; `None` where nothing is read from it.
    chosen: Vec<Option<Lowering>>,
    /// The first reads nothing too much. In the others the last blocks may be read whole, by a price.
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
        let mut transfers = vec![(None, plan.transfer(&request)?)];
        let mut chosen = vec![];
        for (index, source) in sources.iter().enumerate() {
            let Some(source) = source else {
                chosen.push(None);
                continue;
            };
            if source.executes_loops() {
                chosen.push(Some(Lowering::Loops));
                continue;
            }
            let rates = source.rates();
            let mut over = 0;
            if let Some(price) = over_reads_by(load, &rates, choice) {
                let known = transfers.iter().position(|(other, _)| *other == Some(price));
                over = match known {
                    Some(known) => known,
                    None => {
                        transfers.push((Some(price), plan.over_read(&request, &price)?));
                        transfers.len() - 1
                    }
                };
            }
            let work = |group| Work {
                exact: transfers[0].1.summary_of(index, group),
                over: (over > 0).then(|| transfers[over].1.summary_of(index, group)),
            };
            let works: Vec<Work> = (0..transfers[0].1.groups()).map(work).collect();
            let ways = cost::choose(&rates, &works, choice);
            chosen.push(Some(Lowering::ByGroup(ways, over)));
        }
        let own = match load.rest && load.cached != load.before {
            // Blocks that were filled before are the request's own, too.
            true => Some(plan.transfer(&Request { cached: &load.before, ..request })?),
            false => None,
        };
        Ok(Self { chosen, transfers, own })
    }

    /// What is read from one source: nothing, or one thing or two.
    pub(super) fn reads(&self, source: usize) -> Result<Vec<Reads>, LoopsError> {
        let exact = &self.transfers[0].1;
        let mut reads = vec![];
        match self.chosen.get(source) {
            Some(Some(Lowering::Loops)) => reads.push(Reads::Loops(exact.loops(source)?)),
            Some(Some(Lowering::ByGroup(ways, over))) => {
                let mut copies = vec![];
                for (group, way) in ways.iter().enumerate() {
                    let transfer = match way {
                        Way::Packed => continue,
                        Way::Direct => exact,
                        Way::OverRead => &self.transfers[*over].1,
                    };
                    let (filled, more) =
                        (copies.len(), transfer.summary_of(source, group).copies as usize);
                    copies.resize(filled + more, ByteCopy::default());
                    let written = transfer.copies_of(source, group).fill(&mut copies[filled..]);
                    debug_assert_eq!(written, more, "a summary counts what is yielded");
                }
                reads.push(Reads::List(copies));
                let packed = |group: usize| ways[group] == Way::Packed;
                if (0..ways.len()).any(packed) {
                    reads.push(Reads::Packed(exact.loops_of(source, packed)?));
                }
            }
            // Nothing should be read from it. If the plan says otherwise, that is an error to be told.
            Some(None) | None => reads.push(Reads::List(exact.copies(source).collect())),
        }
        reads.retain(|reads| reads.copies() > 0);
        Ok(reads)
    }

    /// How one source is read.
    pub(super) fn lowerings(&self, source: usize) -> Lowerings {
        let mut used = Lowerings::default();
        match self.chosen.get(source) {
            Some(Some(Lowering::Loops)) => used.add(None),
            Some(Some(Lowering::ByGroup(ways, _))) => {
                let exact = &self.transfers[0].1;
                let read = |(group, _): &(usize, &Way)| exact.summary_of(source, *group).copies > 0;
                ways.iter().enumerate().filter(read).for_each(|(_, way)| used.add(Some(*way)));
            }
            Some(None) | None => {}
        }
        used
    }

    /// What is left of the request's own blocks: the same, whatever was chosen.
    pub(super) fn rest(&self) -> Vec<kvferry_plan::Area> {
        self.own.as_ref().unwrap_or(&self.transfers[0].1).rest().collect()
    }
}

/// The price by which the last blocks may be read whole, where that is allowed: what is read beyond the
/// request's end lands in the rest, which must then be zeroed.
fn over_reads_by(load: &Portion, rates: &Rates, choice: Choice) -> Option<Price> {
    let ratio = match choice {
        _ if !load.rest => return None,
        Choice::Only(Way::OverRead) => return Some(Price { launch: 0.0, copy: 1.0, byte: 0.0 }),
        Choice::Only(_) => return None,
        Choice::Auto => rates.direct.copy / rates.direct.byte,
    };
    // To the next power of two, so that sources that are nearly alike share what is prepared.
    let copy = if ratio > 0.0 { ratio.log2().round().exp2() } else { 0.0 };
    Some(Price { launch: 0.0, copy, byte: 1.0 })
}
