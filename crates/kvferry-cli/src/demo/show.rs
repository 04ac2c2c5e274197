//! The show itself: the engines' supervisors, the router, and the dice.

mod chaos;
mod engine;

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvferry_agent::{BlockTable, Failure, Load, Outcome, Ticket, Timings};
use kvferry_layout::Manifest;

use self::engine::{Engine, longest};
use super::crew::{Crew, MemberId};
use super::pool::mix;
use super::report::{ChaosReport, Report, phases};
use super::words::{Command, End, Reply, Setup};
use super::{Demo, shape};

/// Requests under way at once.
const CONCURRENT: usize = 24;
/// How long a supervisor takes to notice that a process has ended.
const NOTICE: Duration = Duration::from_millis(250);

pub(crate) fn run(demo: &Demo, quiet: bool) -> Result<Report, String> {
    let began = Instant::now();
    let model = shape::reduced(&demo.model, demo.layers)?;
    let topologies = std::iter::once(&demo.prefill).chain(&demo.decode);
    let mut engines = vec![];
    for (number, topology) in topologies.enumerate() {
        let name = if number == 0 { "prefill".to_owned() } else { format!("decode-{number}") };
        let manifests = shape::engine(&model, topology, &name)?;
        engines.push(Engine::new(name, topology.clone(), manifests));
    }
    // Refused here, with the reason, before a process is started.
    let sources: Vec<&Manifest> = engines[0].manifests.iter().collect();
    for engine in &engines[1..] {
        for manifest in &engine.manifests {
            kvferry_plan::Plan::compile(manifest, &sources).map_err(|error| {
                format!("{} of {} does not fit: {error}", manifest.label(), engine.name)
            })?;
        }
    }
    let longest = longest(&engines);
    if longest == 0 {
        return Err("the pools are too small for a single request".to_owned());
    }
    let bar = ProgressBar::new(demo.requests as u64);
    if quiet {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let describe = |engine: &Engine| {
        let blocks = engine.manifests[0].groups().iter().map(|group| group.blocks).max();
        format!(
            "{}: {}, {} ranks, {} blocks",
            engine.name,
            engine.topology,
            engine.manifests.len(),
            blocks.unwrap_or(0)
        )
    };
    let report = Report {
        model: model.name.clone(),
        layers: model.layers,
        transport: format!("{:?}", demo.transport).to_lowercase(),
        engines: engines.iter().map(describe).collect(),
        processes: engines.iter().map(|engine| engine.manifests.len() + 1).sum(),
        requests: demo.requests,
        chaos: demo.chaos.then(ChaosReport::default),
        ..Report::default()
    };
    let (term, patience) = match demo.chaos {
        true => (Duration::from_millis(800), Duration::from_millis(2500)),
        false => (Duration::from_secs(10), Duration::from_secs(30)),
    };
    let mut show = Show {
        demo,
        crew: Crew::new(),
        members: HashMap::new(),
        engines,
        requests: vec![],
        names: HashMap::new(),
        dice: Dice(demo.seed),
        term,
        patience,
        longest,
        key: format!("{:016x}{:016x}", mix(demo.seed, 1), u64::from(std::process::id())),
        report,
        all_phases: vec![],
        rates: vec![],
        next_chaos: began + Duration::from_millis(300),
        killed: BTreeSet::new(),
        stopped: vec![],
        bar,
    };
    show.play(began)?;
    let mut report = show.report;
    report.phases = phases(&show.all_phases);
    show.rates.sort_by(f64::total_cmp);
    report.rate = show.rates.get(show.rates.len() / 2).copied().unwrap_or(0.0);
    report.memcpy_rate = memcpy_rate();
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

struct Show<'a> {
    demo: &'a Demo,
    crew: Crew,
    /// The engine of every process of the present.
    members: HashMap<MemberId, usize>,
    engines: Vec<Engine>,
    requests: Vec<Request>,
    names: HashMap<String, usize>,
    dice: Dice,
    term: Duration,
    patience: Duration,
    longest: u64,
    key: String,
    report: Report,
    all_phases: Vec<Timings>,
    rates: Vec<f64>,
    next_chaos: Instant,
    /// Processes that were killed on purpose.
    killed: BTreeSet<MemberId>,
    /// Processes that stand still, and until when.
    stopped: Vec<(MemberId, Instant)>,
    bar: ProgressBar,
}

struct Request {
    name: String,
    seed: u64,
    tokens: u64,
    source: Vec<BlockTable>,
    source_life: usize,
    /// Whether P's blocks are still taken, and by which ranks they are being scrubbed.
    kept: bool,
    scrubbing: BTreeSet<MemberId>,
    decode: usize,
    decode_life: usize,
    destination: Vec<BlockTable>,
    cached: Vec<u64>,
    ticket: Option<Ticket>,
    fate: Fate,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served,
    /// Aborted while it waits, without having been loaded.
    DroppedInQueue,
    /// Aborted so long after its load began.
    AbortedAfter(Duration),
    /// Left alone until its lease has expired.
    Forgotten,
}

enum Phase {
    Filling(BTreeSet<MemberId>),
    Granting,
    Queued { until: Instant },
    Loading { waits: BTreeSet<MemberId>, ends: Vec<End>, abort_at: Option<Instant> },
    Ended,
}

impl Show<'_> {
    fn play(&mut self, began: Instant) -> Result<(), String> {
        for engine in 0..self.engines.len() {
            self.start(engine)?;
        }
        let until = began
            + Duration::from_secs(60)
            + Duration::from_millis(100) * self.demo.requests as u32;
        while !self.over() {
            if Instant::now() > until {
                self.report.problems.push("not all requests ended in time".to_owned());
                break;
            }
            self.step()?;
        }
        for (member, _) in std::mem::take(&mut self.stopped) {
            self.crew.signal(member, libc::SIGCONT);
        }
        // An engine may still be on its way back.
        while self.engines.iter().any(|engine| !engine.up) && Instant::now() < until {
            self.listen(Instant::now() + Duration::from_millis(20))?;
            self.restart_what_died()?;
        }
        self.audit(until)?;
        self.report.lost_blocks =
            self.engines.iter().map(|engine| engine.blocks - engine.free.len()).sum();
        self.report.survivors = self.crew.dismiss(Duration::from_secs(10));
        self.bar.finish_and_clear();
        Ok(())
    }

    fn over(&self) -> bool {
        let ended = |request: &Request| matches!(request.phase, Phase::Ended) && !request.kept;
        self.requests.len() == self.demo.requests && self.requests.iter().all(ended)
    }

    fn step(&mut self) -> Result<(), String> {
        self.admit();
        self.load_what_waits();
        if self.demo.chaos {
            self.chaos();
        }
        self.listen(Instant::now() + Duration::from_millis(3))?;
        self.restart_what_died()
    }

    fn start(&mut self, number: usize) -> Result<(), String> {
        let engine = &self.engines[number];
        let setup = |rank| Setup {
            model: self.demo.model.clone(),
            layers: self.demo.layers,
            topology: engine.topology.to_string(),
            engine: engine.name.clone(),
            rank,
            transport: self.demo.transport,
            key: self.key.clone(),
            term_ms: self.term.as_millis() as u64,
        };
        let scheduler = self.crew.start(&setup(None))?;
        let mut ranks = vec![];
        for rank in 0..engine.manifests.len() as u32 {
            ranks.push(self.crew.start(&setup(Some(rank)))?);
        }
        for member in ranks.iter().chain([&scheduler]) {
            self.members.insert(*member, number);
        }
        let engine = &mut self.engines[number];
        let fresh =
            Engine::new(engine.name.clone(), engine.topology.clone(), engine.manifests.clone());
        let life = engine.life + 1;
        *engine = Engine { scheduler: Some(scheduler), ranks, life, ..fresh };
        Ok(())
    }

    /// New requests, as long as there is room for them.
    fn admit(&mut self) {
        let active = |request: &&Request| !matches!(request.phase, Phase::Ended) || request.kept;
        let mut active = self.requests.iter().filter(active).count();
        while active < CONCURRENT && self.requests.len() < self.demo.requests && self.engines[0].up
        {
            let dice = &mut self.dice;
            // One in ten is shorter than a block, whatever the block.
            let tokens = match dice.chance(10) {
                true => dice.within(1, 12.min(self.longest)),
                false => dice.within(1, self.longest),
            };
            let Some(source) = self.engines[0].allocate(tokens, dice) else { break };
            let number = self.requests.len();
            let fate = match dice.within(0, 99) {
                0..3 => Fate::AbortedAfter(Duration::from_micros(dice.within(0, 4000))),
                3..5 => Fate::DroppedInQueue,
                5..9 if self.demo.chaos => Fate::Forgotten,
                _ => Fate::Served,
            };
            let request = Request {
                name: format!("request-{number}"),
                seed: dice.any(),
                tokens,
                source,
                source_life: self.engines[0].life,
                kept: true,
                scrubbing: BTreeSet::new(),
                decode: 1 + dice.within(0, self.engines.len() as u64 - 2) as usize,
                decode_life: 0,
                destination: vec![],
                cached: vec![],
                ticket: None,
                fate,
                phase: Phase::Filling(self.engines[0].ranks.iter().copied().collect()),
            };
            for rank in &self.engines[0].ranks {
                let (request, seed, tables) =
                    (request.name.clone(), request.seed, request.source.clone());
                self.crew.tell(*rank, &Command::Fill { request, seed, tokens, tables });
            }
            self.names.insert(request.name.clone(), number);
            self.requests.push(request);
            active += 1;
        }
    }

    /// Requests whose turn has come, and aborts.
    fn load_what_waits(&mut self) {
        let now = Instant::now();
        for number in 0..self.requests.len() {
            let request = &mut self.requests[number];
            let engine = &mut self.engines[request.decode];
            if let Phase::Loading { waits, abort_at, .. } = &mut request.phase {
                if abort_at.is_some_and(|at| at <= now) {
                    *abort_at = None;
                    for rank in waits.iter() {
                        let request = request.name.clone();
                        self.crew.tell(*rank, &Command::Abort { request });
                    }
                }
                continue;
            }
            let Phase::Queued { until } = request.phase else { continue };
            if now < until || !engine.up {
                continue;
            }
            let Some(ticket) = request.ticket.clone() else { continue };
            if request.fate == Fate::DroppedInQueue {
                if let Some(scheduler) = engine.scheduler {
                    self.crew.tell(scheduler, &Command::Abandon { ticket });
                }
                request.phase = Phase::Ended;
                self.report.aborted += 1;
                self.bar.inc(1);
                continue;
            }
            let Some(destination) = engine.allocate(request.tokens, &mut self.dice) else {
                continue;
            };
            // Some of the prompt may be known there already.
            let known = match self.dice.chance(30) {
                true => self.dice.within(0, request.tokens - 1),
                false => 0,
            };
            let groups = engine.manifests[0].groups().iter();
            let cached =
                groups.map(|group| group.tokens_per_block.map_or(0, |block| known / block * block));
            request.cached = cached.collect();
            request.destination = destination;
            request.decode_life = engine.life;
            let load = Load {
                request: request.name.clone(),
                ticket,
                tokens: request.tokens,
                cached: request.cached.clone(),
                source: request.source.clone(),
                destination: request.destination.clone(),
                patience: self.patience,
                rest: false,
            };
            for rank in &engine.ranks {
                let (load, seed) = (load.clone(), request.seed);
                self.crew.tell(*rank, &Command::Load { load, seed });
            }
            let abort_at = match request.fate {
                Fate::AbortedAfter(time) => Some(now + time),
                _ => None,
            };
            let waits = engine.ranks.iter().copied().collect();
            request.phase = Phase::Loading { waits, ends: vec![], abort_at };
        }
    }

    /// Hears what the processes say until `until`, or a little longer.
    fn listen(&mut self, until: Instant) -> Result<(), String> {
        while let Some((member, reply)) = self.crew.hear(until) {
            // Of a life that is over.
            let Some(&number) = self.members.get(&member) else { continue };
            match reply {
                Some(Reply::Problem(problem)) => {
                    return Err(format!("{}: {problem}", self.engines[number].name));
                }
                Some(reply) => self.heard(member, number, reply),
                None => {
                    let engine = &mut self.engines[number];
                    if !self.demo.chaos {
                        return Err(format!("a process of {} ended", engine.name));
                    }
                    if let Some(chaos) = &mut self.report.chaos
                        && !self.killed.contains(&member)
                    {
                        chaos.crashed += 1;
                    }
                    engine.up = false;
                    engine.restart_at.get_or_insert(Instant::now() + NOTICE);
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }

    fn heard(&mut self, member: MemberId, number: usize, reply: Reply) {
        let engine = &mut self.engines[number];
        match reply {
            Reply::Card(card) => _ = engine.cards.insert(member, card),
            Reply::Address(_) => engine.listening = true,
            Reply::Published => engine.up = engine.restart_at.is_none(),
            Reply::Audited { wrong, bytes } => {
                self.report.wrong_bytes += wrong;
                self.report.audited_bytes += bytes;
            }
            Reply::Filled { request } => self.on(&request, |show, number| {
                let request = &mut show.requests[number];
                if let Phase::Filling(waits) = &mut request.phase {
                    waits.remove(&member);
                    if waits.is_empty() {
                        request.phase = Phase::Granting;
                        if let Some(scheduler) = show.engines[0].scheduler {
                            let request = request.name.clone();
                            show.crew.tell(scheduler, &Command::Grant { request });
                        }
                    }
                }
            }),
            Reply::Granted { request, ticket } => {
                self.on(&request, |show, number| show.granted(number, ticket));
            }
            Reply::Released { request, why } => self.on(&request, |show, number| {
                if let (Some(chaos), "expired") = (&mut show.report.chaos, why.as_str()) {
                    chaos.leases_expired += 1;
                }
                let request = &mut show.requests[number];
                request.scrubbing = show.engines[0].ranks.iter().copied().collect();
                for rank in &request.scrubbing {
                    let (request, tables) = (request.name.clone(), request.source.clone());
                    show.crew.tell(*rank, &Command::Scrub { request, tables });
                }
            }),
            Reply::Scrubbed { request } => self.on(&request, |show, number| {
                let request = &mut show.requests[number];
                request.scrubbing.remove(&member);
                if request.scrubbing.is_empty() && request.kept {
                    request.kept = false;
                    show.engines[0].give_back(&request.source);
                }
            }),
            Reply::Ended(end) => {
                let request = end.request.clone();
                self.on(&request, |show, number| {
                    if let Phase::Loading { waits, ends, .. } = &mut show.requests[number].phase {
                        if !end.quarantined {
                            waits.remove(&member);
                        }
                        ends.push(*end);
                        show.conclude(number);
                    }
                });
            }
            Reply::Settled { request } => self.on(&request, |show, number| {
                if let Phase::Loading { waits, .. } = &mut show.requests[number].phase {
                    waits.remove(&member);
                    show.conclude(number);
                }
            }),
            Reply::Lost { request: _ } | Reply::Problem(_) => {}
        }
        let engine = &mut self.engines[number];
        if engine.listening && !engine.up && engine.cards.len() == engine.ranks.len() {
            engine.listening = false;
            let cards = engine.ranks.iter().map(|rank| engine.cards[rank].clone()).collect();
            if let Some(scheduler) = engine.scheduler {
                self.crew.tell(scheduler, &Command::Publish { cards });
            }
        }
    }

    fn on(&mut self, request: &str, then: impl FnOnce(&mut Self, usize)) {
        if let Some(number) = self.names.get(request).copied() {
            then(self, number);
        }
    }

    fn granted(&mut self, number: usize, ticket: Option<Ticket>) {
        let request = &mut self.requests[number];
        let (Phase::Granting, Some(ticket)) = (&request.phase, ticket) else { return };
        let wait = match request.fate {
            Fate::Forgotten => self.term * 2,
            _ => Duration::from_millis(self.dice.within(0, 10)),
        };
        request.phase = Phase::Queued { until: Instant::now() + wait };
        // D keeps it alive while it waits.
        if request.fate != Fate::Forgotten
            && let Some(scheduler) = self.engines[request.decode].scheduler
        {
            let patience_ms = self.patience.as_millis() as u64 * 2;
            let ticket = ticket.clone();
            self.crew.tell(scheduler, &Command::Hold { ticket, patience_ms });
        }
        request.ticket = Some(ticket);
    }

    /// When every rank has ended and nothing can land any more.
    fn conclude(&mut self, number: usize) {
        let request = &mut self.requests[number];
        let Phase::Loading { waits, ends, .. } = &request.phase else { return };
        if !waits.is_empty() {
            return;
        }
        let ends = ends.clone();
        request.phase = Phase::Ended;
        self.engines[request.decode].give_back(&request.destination);
        self.bar.inc(1);
        let scheduler = self.engines[request.decode].scheduler;
        let bad = ends.iter().find(|end| end.outcome != Outcome::Done);
        for end in ends.iter().filter(|end| end.outcome == Outcome::Done) {
            self.report.wrong_bytes += end.wrong;
            self.report.compared_bytes += end.compared;
        }
        let Some(bad) = bad else {
            let ticket = request.ticket.clone();
            self.report.exact += usize::from(ends.iter().all(|end| end.wrong == 0));
            self.report.tokens += request.tokens;
            self.report.cached_tokens += request.cached.iter().max().copied().unwrap_or(0);
            for end in &ends {
                self.report.bytes += end.bytes;
                self.report.copies += end.copies;
                self.all_phases.push(end.phases);
                let moving = (end.phases.post + end.phases.wire).as_secs_f64();
                if end.bytes > 1 << 18 && moving > 0.0 {
                    self.rates.push(end.bytes as f64 / moving);
                }
            }
            if let (Some(scheduler), Some(ticket)) = (scheduler, ticket) {
                self.crew.tell(scheduler, &Command::Settle { ticket });
            }
            return;
        };
        // The ranks that were told last may have found the lease gone: the cause is the abort.
        let aborted = ends.iter().any(|end| end.outcome == Outcome::Aborted);
        let reason = match &bad.outcome {
            _ if aborted => None,
            Outcome::Failed(Failure::Deadline { .. }) => Some("past its deadline".to_owned()),
            Outcome::Failed(failure) => Some(failure.kind().replace('_', " ")),
            _ => Some("lease expired".to_owned()),
        };
        match reason {
            None => self.report.aborted += 1,
            Some(reason) => *self.report.failed.entry(reason).or_default() += 1,
        }
        if let (Some(scheduler), Some(ticket)) = (scheduler, request.ticket.clone()) {
            self.crew.tell(scheduler, &Command::Abandon { ticket });
        }
    }

    /// Has anything changed that should not have?
    fn audit(&mut self, until: Instant) -> Result<(), String> {
        let mut expected = 0;
        for engine in &self.engines[1..] {
            for (rank, manifest) in engine.ranks.iter().zip(&engine.manifests) {
                self.crew.tell(*rank, &Command::Audit);
                expected += manifest.regions().iter().map(|region| region.bytes).sum::<u64>();
            }
        }
        while self.report.audited_bytes < expected {
            if Instant::now() > until {
                self.report.problems.push("a rank did not answer the audit".to_owned());
                break;
            }
            self.listen(Instant::now() + Duration::from_millis(20))?;
        }
        Ok(())
    }
}

/// Bytes per second of a plain copy.
fn memcpy_rate() -> f64 {
    let from = vec![1_u8; 64 << 20];
    let mut to = vec![0_u8; from.len()];
    let mut best: f64 = 0.0;
    for _ in 0..4 {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        best = best.max(from.len() as f64 / began.elapsed().as_secs_f64());
    }
    best
}

struct Dice(u64);

impl Dice {
    fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0, 0x5eed)
    }

    fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.any() % (high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.within(0, 99) < percent
    }
}
