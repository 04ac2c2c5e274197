//! The show itself: the engines' supervisors, the router, and the dice.

mod chaos;
mod engine;
mod listen;
mod request;
mod serve;

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use fastrand::Rng;
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_agent::Timings;
use kvferry_layout::Manifest;

use self::engine::{Engine, longest};
use self::request::{Request, Stage};
use crate::crew::{Crew, MemberId};
use crate::options::Options;
use crate::report::{ChaosReport, Report, times};
use crate::shape;
use crate::words::{Command, Setup};

/// Plays the demo to its end. The error says what keeps it from being played at all; what goes wrong
/// while it is played is in the report.
pub fn run(demo: &Options) -> Result<Report, String> {
    let began = Instant::now();
    let model = shape::reduced(&demo.model, demo.layers)?;
    let topologies = std::iter::once(&demo.prefill).chain(&demo.decode);
    let mut engines = vec![];
    for (number, topology) in topologies.enumerate() {
        let name = if number == 0 { "prefill".to_owned() } else { format!("decode-{number}") };
        let manifests = shape::engine(&model, topology, &name)?;
        engines.push(Engine::new(name, topology.clone(), manifests));
    }
    if engines.len() < 2 {
        return Err("there is no decode engine: name at least one".to_owned());
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
        return Err("the pools are too small for a single request: give the engines more blocks \
                    (blocks=64, for example)"
            .to_owned());
    }
    let bar = ProgressBar::new(demo.requests as u64);
    if !demo.progress {
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
    let limits = if demo.chaos { Limits::CHAOS } else { Limits::CALM };
    let mut show = Show {
        demo,
        crew: Crew::new(demo.program.clone()),
        members: HashMap::new(),
        engines,
        requests: vec![],
        names: HashMap::new(),
        dice: Rng::with_seed(demo.seed),
        limits,
        longest,
        key: format!("{:032x}", fastrand::u128(..)),
        report,
        all_times: vec![],
        rates: vec![],
        next_chaos: began + Duration::from_millis(300),
        killed: BTreeSet::new(),
        stopped: vec![],
        bar,
    };
    show.play(began)?;
    let mut report = show.report;
    report.times = times(&show.all_times);
    show.rates.sort_by(f64::total_cmp);
    report.rate = show.rates.get(show.rates.len() / 2).copied().unwrap_or(0.0);
    report.memcpy_rate = memcpy_rate();
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// How long things may take.
struct Limits {
    /// A lease without an extension.
    term: Duration,
    /// A load.
    patience: Duration,
    handshake: Duration,
    /// All of it, and more for every request.
    play: Duration,
    /// The end of all processes.
    dismiss: Duration,
}

impl Limits {
    /// Much has to come to its end by itself.
    const CHAOS: Self = Self {
        term: Duration::from_millis(800),
        patience: Duration::from_millis(2500),
        handshake: Duration::from_secs(5),
        play: Duration::from_secs(60),
        dismiss: Duration::from_secs(10),
    };
    /// Nothing has to; also a machine that is busy gets it done.
    const CALM: Self = Self {
        term: Duration::from_secs(60),
        patience: Duration::from_secs(120),
        handshake: Duration::from_secs(30),
        play: Duration::from_secs(300),
        dismiss: Duration::from_secs(60),
    };
}

struct Show<'a> {
    demo: &'a Options,
    crew: Crew,
    /// The engine of every process of the present.
    members: HashMap<MemberId, usize>,
    engines: Vec<Engine>,
    requests: Vec<Request>,
    names: HashMap<String, usize>,
    dice: Rng,
    limits: Limits,
    longest: u64,
    key: String,
    report: Report,
    all_times: Vec<Timings>,
    rates: Vec<f64>,
    next_chaos: Instant,
    /// Processes that were killed on purpose.
    killed: BTreeSet<MemberId>,
    /// Processes that stand still, and until when.
    stopped: Vec<(MemberId, Instant)>,
    bar: ProgressBar,
}

impl Show<'_> {
    fn play(&mut self, began: Instant) -> Result<(), String> {
        for engine in 0..self.engines.len() {
            self.start(engine)?;
        }
        let until =
            began + self.limits.play + Duration::from_millis(100) * self.demo.requests as u32;
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
        self.report.survivors = self.crew.dismiss(self.limits.dismiss);
        self.bar.finish_and_clear();
        Ok(())
    }

    fn over(&self) -> bool {
        let ended = |request: &Request| matches!(request.stage, Stage::Ended) && !request.kept;
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
            term_ms: self.limits.term.as_millis() as u64,
            handshake_ms: self.limits.handshake.as_millis() as u64,
            audit: self.demo.audit,
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
