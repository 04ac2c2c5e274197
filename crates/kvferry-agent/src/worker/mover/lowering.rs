//! How what is read from one source is carried out. The choice is made here, for each source and group
//! by what its transport takes.

use kvferry_plan::cost::{self, Choice, Way};
use kvferry_plan::{LoopsError, Plan, Request, RequestError, Table, Transfer};
use kvferry_transport::Loops;

use crate::carrier::Source;
use crate::worker::load::Portion;

/// A request against a plan, with the ways to read each source.
#[derive(Debug)]
pub(super) struct Lowered<'p> {
    /// The way of every group of each source; `None` where nothing is read from it.
    chosen: Vec<Option<Vec<Way>>>,
    transfer: Transfer<'p>,
    /// By which the rest is told, where that is another one.
    own: Option<Transfer<'p>>,
}

impl<'p> Lowered<'p> {
    /// Checks the request and chooses the ways to read each source. `None` is a source that nothing is
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
        let groups = 0..transfer.groups();
        let ways = |index: usize, source: &dyn Source| {
            let rates = source.rates();
            if rates.packed.is_none() {
                // What it amounts to need not be known.
                return vec![Way::Direct; groups.len()];
            }
            let groups = groups.clone().map(|group| transfer.summary_of(index, group));
            cost::choose(&rates, &groups.collect::<Vec<_>>(), choice)
        };
        let chosen = sources.iter().enumerate();
        let chosen = chosen.map(|(index, source)| Some(ways(index, source.as_deref()?))).collect();
        let own = match load.rest && load.cached != load.before {
            // Blocks that were filled before are the request's own, too.
            true => Some(plan.transfer(&Request { cached: &load.before, ..request })?),
            false => None,
        };
        Ok(Self { chosen, transfer, own })
    }

    /// What is read from one source: nothing, or one thing or two, each with its way.
    pub(super) fn reads(&self, source: usize) -> Result<Vec<(Way, Loops)>, LoopsError> {
        let Some(Some(ways)) = self.chosen.get(source) else {
            // Nothing should be read from it. If the plan says otherwise, that is an error to be told.
            let loops = self.transfer.loops(source)?;
            return Ok(if loops.runs() > 0 { vec![(Way::Direct, loops)] } else { vec![] });
        };
        let mut reads = vec![];
        for way in Way::ALL.into_iter().filter(|way| ways.contains(way)) {
            let loops = self.transfer.loops_of(source, |group| ways[group] == way)?;
            if loops.runs() > 0 {
                reads.push((way, loops));
            }
        }
        Ok(reads)
    }

    /// What is left of the request's own blocks: the same, whatever was chosen.
    pub(super) fn rest(&self) -> Vec<kvferry_plan::Area> {
        self.own.as_ref().unwrap_or(&self.transfer).rest().collect()
    }
}
