//! Random models, engines and requests, read while prefill computes them: in chunks of any length, with
//! restarts in other blocks, windows and states that change until the end; some chunks layer by layer, as ranks
//! say that they have written them, and a restart may come in between. Whatever happens in between,
//! every byte of decode's memory is in the end what a model of the truth says, and nothing else has changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::looping::Looping;
use crate::common::memory::{Memory, UNTOUCHED};
use crate::common::*;
use kvferry_agent::{
    Carrier, Ended, Ending, Grant, InFlight, Load, Notice, Outcome, Scheduler, SchedulerOptions,
    Worker, WorkerOptions, carry,
};
use kvferry_layout::{Manifest, Region};
use kvferry_plan::{Plan, Request, Table};
use kvferry_testkit::drive::Drawn;
use kvferry_testkit::engine as truth;
use kvferry_testkit::judge::compatible;
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{OwnedRequest, OwnedTable, Shape, draw, entries, places, with_room};
use kvferry_transport::Transport;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};

const SEEDS: u64 = 120;

/// An engine with real memory where the testkit's has numbers.
struct Running<'a> {
    truth: &'a truth::Engine,
    scheduler: Scheduler,
    ranks: Vec<Rank>,
}

struct Rank {
    worker: Worker,
    manifest: Manifest,
    /// Where each region is in truth, and the memory that stands for it.
    regions: Vec<(u64, Arc<Memory>)>,
}

impl Rank {
    fn at(&self, address: u64) -> (&Memory, usize) {
        let region = self.regions.iter().find(|(base, memory)| {
            address.checked_sub(*base).is_some_and(|offset| offset < memory.bytes as u64)
        });
        let (base, memory) = region.expect("an address in a region");
        (memory, (address - base) as usize)
    }

    fn write(&self, address: u64, value: u8) {
        let (memory, offset) = self.at(address);
        memory.write(offset, value);
    }
}

impl<'a> Running<'a> {
    fn start(truth: &'a truth::Engine, by: By) -> Self {
        let name = truth.ranks[0].manifest.engine();
        let scheduler = Scheduler::start(SchedulerOptions::new(name)).unwrap();
        let ranks = truth.ranks.iter().map(|rank| {
            let mut draft = rank.manifest.clone().into_draft();
            let mut regions = vec![];
            for region in &mut draft.regions {
                let memory = Memory::new(region.bytes as usize);
                regions.push((region.base, memory.clone()));
                region.base = memory.base();
            }
            let manifest = Manifest::new(draft).unwrap();
            let options = WorkerOptions::new(truth.ranks.len() as u32);
            let carrier = carrier(by, manifest.regions());
            let worker = Worker::start(options, manifest.clone(), carrier).unwrap();
            Rank { worker, manifest, regions }
        });
        let ranks: Vec<Rank> = ranks.collect();
        scheduler.publish(ranks.iter().map(|rank| rank.worker.card().unwrap()).collect()).unwrap();
        Self { truth, scheduler, ranks }
    }

    /// Everything is overwritten by what other requests leave.
    fn scramble(&self, dice: &mut Dice) {
        for (_, memory) in self.ranks.iter().flat_map(|rank| &rank.regions) {
            memory.fill(201 + dice.within(0, 20) as u8);
        }
    }

    /// What prefill leaves after `tokens` of a request: of what only grows alone, or of everything.
    fn compute(&self, request: &OwnedRequest, epoch: u64, tokens: u64, all: bool) {
        for rank in 0..self.ranks.len() {
            self.compute_on(rank, request, epoch, tokens, &|_, grows| all || grows);
        }
    }

    /// The same on one rank, of some states: those that are chosen by their names and by whether they only
    /// grow.
    fn compute_on(
        &self,
        rank: usize,
        request: &OwnedRequest,
        epoch: u64,
        tokens: u64,
        chosen: &dyn Fn(&str, bool) -> bool,
    ) {
        for (index, group) in self.truth.recipe.groups.iter().enumerate() {
            let table = &request.source[index];
            for holding in &self.truth.ranks[rank].holdings[index] {
                if !chosen(&holding.state, grows(self.truth, index)) {
                    continue;
                }
                let live = group.reach().live(holding.law, tokens);
                for (entry, position, slot) in places(holding, &live) {
                    let Some(block) = table.at(position, group.null_block) else { continue };
                    let place = (entry, block, slot);
                    let rank = &self.ranks[rank];
                    for_bytes(holding, epoch, place, |at, value| rank.write(at, value));
                }
            }
        }
    }
}

impl Running<'_> {
    /// The same in a step that readers know of: state by state, on the ranks in any order, each told of as
    /// soon as it is written. It may break off.
    fn compute_by_layer(
        &self,
        request: &OwnedRequest,
        epoch: u64,
        (step, tokens): (u64, u64),
        dice: &mut Dice,
        breaks_off: bool,
    ) {
        let mut states: Vec<(usize, String)> = vec![];
        for (rank, truth) in self.truth.ranks.iter().enumerate() {
            let all = (0..truth.holdings.len()).filter(|group| grows(self.truth, *group));
            let all = all.flat_map(|group| &truth.holdings[group]);
            states.extend(all.map(|holding| (rank, holding.state.clone())));
        }
        states.sort();
        states.dedup();
        dice.shuffle(&mut states);
        self.ranks.iter().for_each(|rank| rank.worker.begin_step(step));
        let count = if breaks_off { dice.within(0, states.len() as u64) } else { u64::MAX };
        for (rank, state) in states.into_iter().take(count as usize) {
            self.compute_on(rank, request, epoch, tokens, &|name, grows| grows && name == state);
            self.ranks[rank].worker.wrote(step, [state]);
            if dice.chance(30) {
                thread::sleep(Duration::from_millis(dice.within(0, 4)));
            }
        }
        if !breaks_off && dice.chance(50) {
            self.ranks.iter().for_each(|rank| rank.worker.end_step(step));
        }
    }
}

fn carrier(by: By, regions: &[Region]) -> Arc<dyn Carrier> {
    match by {
        By::Tcp => {
            let transport = Tcp::new(TcpOptions::default()).unwrap();
            for region in regions {
                // SAFETY: test memory is never freed, and accessed without references.
                unsafe { transport.register(*region) }.unwrap();
            }
            carry(Arc::new(transport))
        }
        By::Local => {
            let transport = Local::new(LocalOptions::default()).unwrap();
            for region in regions {
                // SAFETY: as above.
                unsafe { transport.register(*region) }.unwrap();
            }
            carry(Arc::new(transport))
        }
        _ => Arc::new(Looping),
    }
}

/// Whether a group's blocks only get more, whatever the request's length.
fn grows(engine: &truth::Engine, group: usize) -> bool {
    let facts = &engine.ranks[0].manifest.groups()[group];
    facts.window.tokens.is_none() && facts.tokens_per_block.is_some()
}

/// Every byte of an entry: its address and what it must be, wherever it lies. A request that was started
/// over leaves other bytes than before, so that nobody can mistake one for the other.
fn for_bytes(
    holding: &truth::Holding,
    epoch: u64,
    (entry, block, slot): (u64, u32, u64),
    mut each: impl FnMut(u64, u8),
) {
    for element in 0..holding.volume() {
        let address = holding.address(block, slot, element);
        for byte in 0..holding.element {
            let name =
                holding.state.bytes().fold(7_u64, |hash, b| hash.wrapping_mul(31) + u64::from(b));
            let place = holding.whole(element) * 16 + byte;
            each(address + byte, value(name + epoch, entry, place / 251, place));
        }
    }
}

/// The tables as far as they are known after `tokens`. Those of what moves on are anything.
fn known_tables(
    engine: &truth::Engine,
    tables: &[OwnedTable],
    (tokens, spare): (u64, u64),
    dice: &mut Dice,
) -> Vec<kvferry_agent::BlockTable> {
    let known = tables.iter().enumerate().map(|(index, table)| {
        let mut blocks = table.blocks.clone();
        match engine.recipe.groups[index].tokens_per_block {
            Some(block) if grows(engine, index) => {
                // Some engines have a block more than they need.
                let end = tokens.div_ceil(block) + spare;
                blocks.truncate(end.saturating_sub(table.first) as usize);
            }
            _ => dice.shuffle(&mut blocks),
        }
        kvferry_agent::BlockTable { first: table.first, blocks }
    });
    known.collect()
}

fn all_tables(tables: &[OwnedTable]) -> Vec<kvferry_agent::BlockTable> {
    let tables = tables.iter();
    tables
        .map(|table| kvferry_agent::BlockTable { first: table.first, blocks: table.blocks.clone() })
        .collect()
}

fn borrowed(tables: &[OwnedTable]) -> Vec<Table<'_>> {
    let tables = tables.iter();
    tables.map(|table| Table { first: table.first, blocks: &table.blocks }).collect()
}

#[test]
fn whatever_happens_while_it_grows_every_byte_is_right_in_the_end() {
    let (mut requests, mut epochs, mut parts, mut ahead) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let pair = Drawn::new(seed);
        let all: Vec<usize> = (0..pair.source.ranks.len()).collect();
        let fits = |rank| compatible(&pair.source, &all, &pair.destination, rank).is_ok();
        if !(0..pair.destination.ranks.len()).all(fits) {
            continue;
        }
        let by = [By::Looping, By::Tcp, By::Local][seed as usize % 3];
        let p = Running::start(&pair.source, by);
        let d = Running::start(&pair.destination, by);
        let mut dice = Dice::new(seed ^ 0x6167_656e_7473);
        let mut step = 0;
        for round in 0..2 {
            let shape = if dice.chance(50) { Shape::Ascending } else { Shape::Scattered };
            let request = draw(&pair.source, &pair.destination, 60, shape, &mut dice);
            if request.tokens == 0 {
                continue;
            }
            let name = format!("{seed}/{round}");
            let (restarts, steps) = serve(&p, &d, &name, request, &mut step, &mut dice);
            (requests, epochs, parts) = (requests + 1, epochs + restarts, parts + steps);
        }
        ahead += d.ranks.iter().map(|rank| bytes_ahead(&rank.worker)).sum::<u64>();
    }
    println!("{requests} requests, {epochs} restarts, {parts} steps, {ahead} bytes ahead");
    assert!(requests > 50 && epochs > 20 && parts > 150 && ahead > 1000, "little was tried");
}

/// One request, from the first chunk to the last byte. Answers how often it started over, and in how many
/// steps it was computed.
fn serve(
    p: &Running<'_>,
    d: &Running<'_>,
    name: &str,
    mut request: OwnedRequest,
    step: &mut u64,
    dice: &mut Dice,
) -> (u64, u64) {
    let tokens = request.tokens;
    p.scramble(dice);
    for (_, memory) in d.ranks.iter().flat_map(|rank| &rank.regions) {
        memory.fill(UNTOUCHED);
    }
    let rest = dice.chance(50);
    let ticket = p.scheduler.open(name, None).unwrap();
    let mut load = Load::new(name, ticket, tokens, all_tables(&request.destination))
        .cached(request.cached.clone())
        .within(LONG, LONG);
    load.rest = rest;
    let (late, spare) = (dice.chance(20), dice.within(0, 1));
    let start = || d.ranks.iter().for_each(|rank| rank.worker.load(load.clone()).unwrap());
    if !late {
        start();
    }
    let (mut frontier, mut reached, mut restarts, mut steps) = (0, 0, 0, 0);
    // What was said of a step before it began, which then holds.
    let mut promised = None;
    while frontier < tokens {
        steps += 1;
        let before = frontier;
        let by_layer = promised.is_some() || dice.chance(60);
        let mut breaks_off = false;
        frontier = promised.take().unwrap_or((frontier + dice.within(1, 20)).min(tokens));
        if by_layer {
            breaks_off = restarts < 2 && dice.chance(20);
            *step += 1;
            // Some engines know already what they do after that.
            let then = (frontier + dice.within(0, 20)).min(tokens);
            let mut in_flight = vec![InFlight { step: *step, tokens: frontier }];
            if then > frontier {
                in_flight.push(InFlight { step: *step + 1, tokens: then });
                promised = Some(then);
            }
            reached = then.max(reached);
            let tables = known_tables(p.truth, &request.source, (reached, spare), dice);
            p.scheduler.advance_with(name, before, tables, &in_flight).unwrap();
            if dice.chance(50) && !late {
                // So that they listen.
                thread::sleep(Duration::from_millis(2));
            }
            p.compute_by_layer(&request, restarts, (*step, frontier), dice, breaks_off);
        } else {
            p.compute(&request, restarts, frontier, false);
        }
        if !breaks_off && (!by_layer || dice.chance(70)) {
            // What was said once of the tables stays.
            let said = (frontier.max(reached), spare);
            let tables = known_tables(p.truth, &request.source, said, dice);
            p.scheduler.advance(name, frontier, tables).unwrap();
        }
        match dice.within(0, 2) {
            0 => thread::sleep(Duration::from_millis(dice.within(0, 3))),
            1 if !late => wait_until_idle(d),
            _ => {}
        }
        if breaks_off || (restarts < 2 && dice.chance(15)) {
            restarts += 1;
            p.scheduler.restart(name).unwrap();
            // At once others overwrite everything, and it is computed again elsewhere.
            p.scramble(dice);
            let again =
                with_room(p.truth, d.truth, tokens, request.cached.clone(), Shape::Scattered, dice);
            if let Some(again) = again {
                request.source = again.source;
            }
            (frontier, reached, promised) = (0, 0, None);
            // A number that was said once is not used for anything else.
            *step += 1;
        }
    }
    if late {
        start();
    }
    p.compute(&request, restarts, tokens, true);
    let tables = all_tables(&request.source);
    p.scheduler.grant(name, Grant { epoch: 0, tokens, tables }).unwrap();
    let end = |rank: &Rank| match rank.worker.wait(Instant::now() + LONG).as_slice() {
        [Notice::Ended(ending)] => ending.clone(),
        other => panic!("{name}: {other:?}"),
    };
    let endings: Vec<Ending> = d.ranks.iter().map(end).collect();
    let outcomes: Vec<&Outcome> = endings.iter().map(|ending| &ending.outcome).collect();
    assert!(outcomes.iter().all(|outcome| **outcome == Outcome::Done), "{name}: {outcomes:?}");
    for (index, ending) in endings.iter().enumerate() {
        let rest = rest.then_some(&ending.rest);
        check_rank((p, d), index, (&request, restarts), rest, name);
    }
    let released = p.scheduler.wait_released(Instant::now() + LONG);
    assert_eq!(released.len(), 1);
    assert_eq!(released[0].why, Ended::Confirmed);
    (restarts, steps)
}

/// What was read of layers before others were complete, of loads that came to a good end.
fn bytes_ahead(worker: &Worker) -> u64 {
    let text = worker.metrics();
    let line = text.lines().find(|line| line.starts_with("kvferry_read_ahead_bytes_total"));
    line.and_then(|line| line.rsplit(' ').next()).unwrap().parse::<f64>().unwrap() as u64
}

/// Until all that is complete is read.
fn wait_until_idle(d: &Running<'_>) {
    let doing = |rank: &Rank| rank.worker.loads().iter().all(|(_, doing)| *doing == "following");
    eventually("it follows", || d.ranks.iter().all(doing));
}

/// Compares all of a rank's memory with what must be there.
fn check_rank(
    (p, d): (&Running<'_>, &Running<'_>),
    index: usize,
    (request, epoch): (&OwnedRequest, u64),
    rest: Option<&Vec<kvferry_plan::Area>>,
    name: &str,
) {
    let (rank, truth) = (&d.ranks[index], &d.truth.ranks[index]);
    let mut expected: BTreeMap<u64, u8> = BTreeMap::new();
    for (number, group) in d.truth.recipe.groups.iter().enumerate() {
        let (table, cached) = (&request.destination[number], request.cached[number]);
        for holding in &truth.holdings[number] {
            let needed = group.copied(holding, p.truth).needed(holding.law, cached, request.tokens);
            assert!(needed.end <= entries(holding.law, request.tokens));
            for (entry, position, slot) in places(holding, &needed) {
                let block = table.at(position, group.null_block).expect("there is room");
                for_bytes(holding, epoch, (entry, block, slot), |at, value| {
                    expected.insert(at, value);
                });
            }
        }
    }
    if let Some(rest) = rest {
        let sources: Vec<&Manifest> = p.ranks.iter().map(|rank| &rank.manifest).collect();
        let plan = Plan::compile(&rank.manifest, &sources).unwrap();
        let whole = Request {
            tokens: request.tokens,
            cached: &request.cached,
            source: &borrowed(&request.source),
            destination: &borrowed(&request.destination),
        };
        let at_once: Vec<_> = plan.transfer(&whole).unwrap().rest().unwrap();
        assert_eq!(*rest, at_once, "{name}: what is left is what is left of a load at once");
        for area in rest {
            for at in area.address..area.address + area.bytes {
                let (base, memory) = rank
                    .regions
                    .iter()
                    .find(|(_, memory)| {
                        (memory.base()..memory.base() + memory.bytes as u64).contains(&at)
                    })
                    .expect("inside");
                memory.write((at - memory.base()) as usize, 0);
                expected.insert(base + (at - memory.base()), 0);
            }
        }
    }
    for (base, memory) in &rank.regions {
        for offset in 0..memory.bytes {
            let wanted = expected.get(&(base + offset as u64)).copied().unwrap_or(UNTOUCHED);
            let found = memory.read(offset);
            assert_eq!(found, wanted, "{name}: rank {index}, byte {offset} at {base:#x}");
        }
    }
}
