//! What is measured of each case.

use std::io::Write;
use std::time::{Duration, Instant};

use kvferry_demo::own_output;
use kvferry_layout::BlockPair;
use kvferry_plan::lowering::{Choice, Way, lower};
use kvferry_plan::{ByteCopy, Loops, Request, Table};
use kvferry_testkit::one_by_one;
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{Error, Operation, Status, Transport, carry_out};
use serde::{Deserialize, Serialize};

use super::case::{Case, Ready, cases};
use super::source::{Source, seed};
use crate::Failure;
use crate::{chosen, memory};

pub(super) struct Settings {
    pub(super) rounds: usize,
    pub(super) only: String,
}

/// What was found for one case. Times are the best of the rounds, in milliseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) transport: String,
    pub(super) case: String,
    pub(super) bytes: u64,
    pub(super) copies: u64,
    pub(super) direct_ms: f64,
    /// `None` where the transport does not pack.
    pub(super) packed_ms: Option<f64>,
    /// Every block's span in one copy, and what matters taken from it.
    pub(super) full_read_ms: f64,
    /// What was chosen, what it took, and that over the best of what it could choose.
    pub(super) chosen: String,
    pub(super) chosen_ms: f64,
    pub(super) of_best: f64,
    /// Runs of fewer bytes are packed.
    pub(super) packs_below: u64,
}

/// Reads all cases by one transport, and prints a line of JSON for each.
pub(super) fn run<T: Transport>(
    settings: &Settings,
    make: impl Fn() -> Result<T, Error>,
) -> Result<(), Failure> {
    // SAFETY: a plain request to the kernel: end this process with the one that started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut output = own_output::take()?;
    let mut source = Source::start(make()?.name())?;
    for case in chosen(cases(), Case::name, &settings.only)? {
        let ready = case.prepare(&mut source)?;
        let row = measure(&case.name(), &ready, &make()?, settings.rounds)?;
        writeln!(output, "{}", serde_json::to_string(&row)?)?;
    }
    Ok(())
}

/// A way to read, as it is measured.
#[derive(Clone, Copy, PartialEq)]
enum Tried {
    Way(Way),
    Full,
    Chosen,
}

fn measure<T: Transport>(
    name: &str,
    ready: &Ready,
    transport: &T,
    rounds: usize,
) -> Result<Row, Failure> {
    for span in &ready.memory {
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        unsafe { transport.register(span.region())? };
    }
    // For full reads: as much as the source has.
    let scratch = memory::zeros(ready.spans.iter().map(|span| span.bytes as usize).sum())?;
    // SAFETY: it is taken back below.
    let region = unsafe { transport.register(scratch.region())? };
    let peer = transport.connect(&ready.description, soon())?;
    let packs_below = transport.packs_below(&peer);
    let (from, to) = (borrowed(&ready.from), borrowed(&ready.to));
    let cached = vec![0; to.len()];
    let request =
        Request { tokens: ready.tokens, cached: &cached, source: &from, destination: &to };
    let reader =
        Reader { ready, transport, peer: &peer, packs_below, request: &request, scratch: &scratch };

    let mut tried = vec![Tried::Way(Way::Direct)];
    tried.extend((packs_below > 0).then_some(Tried::Way(Way::Packed)));
    tried.extend([Tried::Full, Tried::Chosen]);
    for way in &tried {
        reader.check(*way)?;
    }
    let mut best = vec![f64::INFINITY; tried.len()];
    for round in 0..rounds {
        // Each behind every other in turn: what is read before it leaves the caches as it does.
        for at in (0..tried.len()).map(|at| (at + round) % tried.len()) {
            let began = Instant::now();
            reader.read(tried[at])?;
            best[at] = best[at].min(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    let time =
        |wanted: Tried| tried.iter().zip(&best).find(|(way, _)| **way == wanted).map(|(_, ms)| *ms);
    let ways = tried.iter().zip(&best).filter(|(tried, _)| matches!(tried, Tried::Way(_)));
    let best_ms = ways.map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min);
    let exact = ready.plan.transfer(&request)?;
    let (mut bytes, mut copies) = (0, 0);
    for source in 0..ready.plan.source_count() {
        let sum = exact.summary(source)?;
        (bytes, copies) = (bytes + sum.bytes, copies + sum.copies);
    }
    let chosen = reader.choice()?;
    let chosen_ms = time(Tried::Chosen).unwrap_or(f64::NAN);
    transport.disconnect(&peer);
    transport.deregister(region, soon())?;
    Ok(Row {
        transport: transport.name().to_owned(),
        case: name.to_owned(),
        bytes,
        copies,
        direct_ms: time(Tried::Way(Way::Direct)).unwrap_or(f64::NAN),
        packed_ms: time(Tried::Way(Way::Packed)),
        full_read_ms: time(Tried::Full).unwrap_or(f64::NAN),
        of_best: chosen_ms / best_ms,
        chosen,
        chosen_ms,
        packs_below,
    })
}

struct Reader<'a, T: Transport> {
    ready: &'a Ready,
    transport: &'a T,
    peer: &'a T::Peer,
    packs_below: u64,
    request: &'a Request<'a>,
    scratch: &'a HostMemory,
}

impl<T: Transport> Reader<'_, T> {
    /// Everything from block ids to the last byte.
    fn read(&self, way: Tried) -> Result<(), Failure> {
        let choice = match way {
            Tried::Way(way) => Choice::Only(way),
            Tried::Chosen => Choice::Auto,
            Tried::Full => return self.read_full(),
        };
        let exact = self.ready.plan.transfer(self.request)?;
        let mut operations = vec![];
        for source in 0..self.ready.plan.source_count() {
            // As a worker does it.
            for (way, loops) in lower(exact.loops(source)?, self.packs_below, choice) {
                operations.push(match way {
                    Way::Direct => self.transport.read(self.peer, &loops, soon())?,
                    Way::Packed => self.transport.read_packed(self.peer, &loops, soon())?,
                });
            }
        }
        operations.iter().try_for_each(done)
    }

    /// What is chosen for all sources.
    fn choice(&self) -> Result<String, Failure> {
        let exact = self.ready.plan.transfer(self.request)?;
        let mut names = vec![];
        for source in 0..self.ready.plan.source_count() {
            for (way, _) in lower(exact.loops(source)?, self.packs_below, Choice::Auto) {
                if !names.contains(&way.name()) {
                    names.push(way.name());
                }
            }
        }
        names.sort_unstable();
        Ok(names.join(" and "))
    }

    /// Reads every block's span as one copy, and takes what matters from it.
    fn read_full(&self) -> Result<(), Failure> {
        let exact = self.ready.plan.transfer(self.request)?;
        let mut at = self.scratch.base();
        for source in 0..self.ready.plan.source_count() {
            let loops = exact.loops(source)?;
            // What the nests of one block span, as few spans as can be.
            let mut spans: Vec<(u64, u64)> = vec![];
            for nest in loops.nests() {
                let reach: u64 =
                    nest.loops.iter().map(|repeat| (repeat.count - 1) * repeat.source).sum();
                for pair in nest.pairs {
                    let start = nest.source + u64::from(pair.source) * nest.blocks.0;
                    spans.push((start, start + reach + nest.run));
                }
            }
            spans.sort_unstable();
            spans.dedup_by(|next, span| {
                let touches = next.0 <= span.1;
                span.1 = if touches { span.1.max(next.1) } else { span.1 };
                touches
            });
            let mut copies = vec![];
            for (start, end) in &spans {
                copies.push(ByteCopy { source: *start, destination: at, bytes: end - start });
                at += end - start;
            }
            done(&self.transport.read(self.peer, &one_by_one(&copies), soon())?)?;
            let mut scatter = Loops::default();
            let table = scatter.add_table([BlockPair::default()]);
            for nest in loops.nests() {
                for pair in nest.pairs {
                    let start = nest.source + u64::from(pair.source) * nest.blocks.0;
                    let to = nest.destination + u64::from(pair.destination) * nest.blocks.1;
                    let copy = &copies[copies.partition_point(|copy| copy.source <= start) - 1];
                    let from = copy.destination + (start - copy.source);
                    scatter.add_nest((from, to), nest.run, (0, 0), nest.loops, table)?;
                }
            }
            // SAFETY: what is read lies in the scratch memory, what is written in the destination's
            // regions, as the plan has proven; neither has references to it.
            unsafe { carry_out(&scatter) };
        }
        Ok(())
    }

    /// Reads once into poisoned memory and looks at every byte.
    fn check(&self, way: Tried) -> Result<(), Failure> {
        const POISON: u8 = 0xee;
        for span in &self.ready.memory {
            span.write(0, &vec![POISON; span.bytes()]);
        }
        self.read(way)?;
        let exact = self.ready.plan.transfer(self.request)?;
        let mut expected: Vec<Vec<u8>> =
            self.ready.memory.iter().map(|span| vec![POISON; span.bytes()]).collect();
        for (number, region) in self.ready.spans.iter().enumerate() {
            let theirs = HostMemory::new(region.bytes as usize)?;
            memory::fill(&theirs, seed(number));
            let theirs = theirs.snapshot();
            for source in 0..self.ready.plan.source_count() {
                for copy in exact.loops(source)?.copies() {
                    let Some(from) =
                        copy.source.checked_sub(region.base).filter(|at| *at < region.bytes)
                    else {
                        continue;
                    };
                    let spans = self.ready.memory.iter().zip(&mut expected);
                    let inside = |span: &HostMemory| {
                        copy.destination
                            .checked_sub(span.base())
                            .filter(|at| *at < span.bytes() as u64)
                    };
                    for (span, expected) in spans {
                        if let Some(to) = inside(span) {
                            let (from, to, bytes) =
                                (from as usize, to as usize, copy.bytes as usize);
                            expected[to..to + bytes].copy_from_slice(&theirs[from..from + bytes]);
                        }
                    }
                }
            }
        }
        for (span, expected) in self.ready.memory.iter().zip(&expected) {
            if span.snapshot() != *expected {
                return Err("a read is not exact".into());
            }
        }
        Ok(())
    }
}

fn borrowed(tables: &[kvferry_plan::BlockTable]) -> Vec<Table<'_>> {
    tables.iter().map(|table| table.borrow()).collect()
}

fn done(operation: &impl Operation) -> Result<(), Failure> {
    match operation.wait(soon()) {
        Status::Done(_) => Ok(()),
        other => Err(format!("a read ended as {other:?}").into()),
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[cfg(test)]
mod tests {
    use kvferry_transport::{local, tcp};

    /// Every row that was published: what is packed and what is not, by the constants, takes at most 15 % more than
    /// the better of the two ways took.
    #[test]
    fn constants_choose_well_in_every_row_that_was_measured() {
        let files = [
            include_str!("../../../../docs/measured/lowering-2026-11-18.json"),
            include_str!("../../../../docs/measured/lowering-2026-11-19.json"),
        ];
        let (mut rows, mut worst) = (0, 1.0_f64);
        for file in files {
            let file: serde_json::Value = serde_json::from_str(file).unwrap();
            for row in file["rows"].as_array().unwrap() {
                let packs_below = match row["transport"].as_str().unwrap() {
                    "tcp" => tcp::PACKS_BELOW,
                    "local" => local::PACKS_BELOW,
                    "nixl" => kvferry_nixl::PACKS_BELOW,
                    other => panic!("{other}"),
                };
                let number = |name: &str| row[name].as_f64().unwrap();
                let (direct, packed) = (number("direct_ms"), number("packed_ms"));
                let mean_run = number("bytes") / number("copies");
                let chosen = if mean_run < packs_below as f64 { packed } else { direct };
                let of_best = chosen / direct.min(packed);
                assert!(of_best <= 1.15, "{of_best:.2} of the best: {row}");
                (rows, worst) = (rows + 1, worst.max(of_best));
            }
        }
        println!("{rows} rows; the worst takes {worst:.2} of the best");
        assert_eq!(rows, 2 * 39);
    }
}
