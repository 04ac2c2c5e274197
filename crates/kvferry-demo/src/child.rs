//! One process of the demo: a rank, or an engine's scheduler.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::{
    Audit, Card, Carrier, Key, Load, Notice, Outcome, Scheduler, SchedulerOptions, Trust, Worker,
    WorkerOptions, carry,
};
use kvferry_layout::Manifest;
use kvferry_nixl::{Nixl, NixlOptions};
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use kvferry_transport::{Region, Transport};
use parking_lot::Mutex;

use crate::own_output;
use crate::pool::Pool;
use crate::shape;
use crate::words::{Command, End, Reply, Setup, TransportKind};

/// Plays its part until standard input ends: whatever becomes of the demo, no process stays behind. Answers whether it could.
pub fn run() -> bool {
    let output = own_output::take().map(|output| OUTPUT.set(Mutex::new(output)));
    if !matches!(output, Ok(Ok(()))) {
        return false;
    }
    let (lines, commands) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    let Ok(first) = commands.recv() else { return false };
    let played =
        serde_json::from_str(&first).map_err(|error| error.to_string()).and_then(|setup: Setup| {
            match setup.rank {
                Some(rank) => play_rank(&setup, rank, &commands),
                None => play_scheduler(&setup, &commands),
            }
        });
    match played {
        Ok(()) => true,
        Err(problem) => {
            say(&Reply::Problem(problem));
            false
        }
    }
}

/// Where replies go.
static OUTPUT: OnceLock<Mutex<File>> = OnceLock::new();

fn say(reply: &Reply) {
    let Some(output) = OUTPUT.get() else { return };
    let mut out = output.lock();
    // Whoever listened is gone: this process ends with its standard input.
    if let Ok(line) = serde_json::to_string(reply) {
        _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

/// Calls `work` between commands; answers when there are no more.
fn obey(
    commands: &mpsc::Receiver<String>,
    mut obey: impl FnMut(Command) -> Result<(), String>,
    mut work: impl FnMut(),
) -> Result<(), String> {
    loop {
        match commands.recv_timeout(Duration::from_millis(2)) {
            Ok(line) => {
                obey(serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))?)?;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        work();
    }
}

fn trust(setup: &Setup) -> Result<Trust, String> {
    Key::new(setup.key.as_bytes()).map(Trust::Key).map_err(|error| error.to_string())
}

fn play_rank(setup: &Setup, rank: u32, commands: &mpsc::Receiver<String>) -> Result<(), String> {
    let manifests = shape::manifests(setup)?;
    let ranks = manifests.len() as u32;
    let manifest = manifests.into_iter().nth(rank as usize).ok_or("no such rank")?;
    let mut pool = Pool::new(manifest)?;
    let carrier = carrier(setup.transport, &pool)?;
    let mut options = WorkerOptions::new(ranks);
    options.trust = trust(setup)?;
    options.handshake = Duration::from_millis(setup.handshake_ms);
    options.audit = Audit::fraction(setup.audit).map_err(|error| error.to_string())?;
    let manifest: Manifest = pool.manifest().clone();
    let worker = Worker::start(options, manifest, carrier).map_err(|error| error.to_string())?;
    let worker = Arc::new(worker);
    say(&Reply::Card(worker.card().map_err(|error| error.to_string())?.to_bytes()));

    let loads: Mutex<HashMap<String, (Load, u64)>> = Mutex::default();
    let pool = Mutex::new(&mut pool);
    let lock = |notice: Notice| {
        let mut loads = loads.lock();
        let mut pool = pool.lock();
        match notice {
            Notice::Ended(ending) => {
                let Some((load, seed)) = loads.get(&ending.request) else { return };
                let (mut wrong, mut compared) = (0, 0);
                if ending.outcome == Outcome::Done {
                    (wrong, compared) =
                        pool.check(*seed, load.tokens, &load.cached, &load.destination);
                } else if !ending.quarantined {
                    pool.scrub(&load.destination);
                }
                if !ending.quarantined {
                    loads.remove(&ending.request);
                }
                say(&Reply::Ended(Box::new(End {
                    request: ending.request,
                    outcome: ending.outcome,
                    quarantined: ending.quarantined,
                    bytes: ending.bytes,
                    copies: ending.copies,
                    phases: ending.timings,
                    wrong,
                    compared,
                })));
            }
            Notice::Settled { request } => {
                if let Some((load, _)) = loads.remove(&request) {
                    pool.scrub(&load.destination);
                }
                say(&Reply::Settled { request });
            }
        }
    };
    obey(
        commands,
        |command| {
            match command {
                Command::Fill { request, seed, tokens, tables } => {
                    let mut pool = pool.lock();
                    pool.fill(seed, tokens, &tables);
                    say(&Reply::Filled { request });
                }
                Command::Scrub { request, tables } => {
                    pool.lock().scrub(&tables);
                    say(&Reply::Scrubbed { request });
                }
                Command::Load { load, seed } => {
                    let mut loads = loads.lock();
                    pool.lock().scrub(&load.destination);
                    loads.insert(load.request.clone(), (load.clone(), seed));
                    worker.load(load).map_err(|error| error.to_string())?;
                }
                Command::Abort { request } => worker.abort(&request),
                Command::Audit => {
                    let pool = pool.lock();
                    say(&Reply::Audited { wrong: pool.audit(), bytes: pool.span().1 });
                }
                other => return Err(format!("a rank cannot {other:?}")),
            }
            Ok(())
        },
        || worker.notices().into_iter().for_each(lock),
    )
}

fn carrier(kind: TransportKind, pool: &Pool) -> Result<Arc<dyn Carrier>, String> {
    fn registered<T: Transport + std::fmt::Debug>(
        transport: Result<T, kvferry_transport::Error>,
        pool: &Pool,
    ) -> Result<Arc<dyn Carrier>, String> {
        let transport = transport.map_err(|error| error.to_string())?;
        let (base, bytes) = pool.span();
        // SAFETY: the pool is never freed, and accessed through its address alone, never by reference.
        unsafe { transport.register(Region::host(base, bytes)) }
            .map_err(|error| error.to_string())?;
        Ok(carry(Arc::new(transport)))
    }
    match kind {
        TransportKind::Local => registered(Local::new(LocalOptions::default()), pool),
        TransportKind::Tcp => registered(Tcp::new(TcpOptions::default()), pool),
        TransportKind::Nixl => registered(Nixl::new(&NixlOptions::default()), pool),
    }
}

fn play_scheduler(setup: &Setup, commands: &mpsc::Receiver<String>) -> Result<(), String> {
    let mut options = SchedulerOptions::new(setup.engine.clone());
    options.trust = trust(setup)?;
    options.term = Duration::from_millis(setup.term_ms);
    let scheduler = Scheduler::start(options).map_err(|error| error.to_string())?;
    say(&Reply::Address(scheduler.address().to_owned()));
    obey(
        commands,
        |command| {
            match command {
                Command::Publish { cards } => {
                    let cards = cards.iter().map(|card| Card::from_bytes(card));
                    let cards: Result<_, _> = cards.collect();
                    let cards = cards.map_err(|error| error.to_string())?;
                    scheduler.publish(cards).map_err(|error| error.to_string())?;
                    say(&Reply::Published);
                }
                Command::Grant { request, grant } => {
                    let ticket = scheduler.grant(&request, grant).ok();
                    say(&Reply::Granted { request, ticket });
                }
                Command::Hold { ticket, patience_ms } => {
                    scheduler.hold(&ticket, Duration::from_millis(patience_ms));
                }
                Command::Settle { ticket } => scheduler.settle(&ticket),
                Command::Abandon { ticket } => scheduler.abandon(&ticket),
                other => return Err(format!("a scheduler cannot {other:?}")),
            }
            Ok(())
        },
        || {
            for released in scheduler.wait_released(Instant::now()) {
                let why = released.why.name().to_owned();
                say(&Reply::Released { request: released.request, why });
            }
            for lost in scheduler.lost() {
                let request = lost.ticket.map(|ticket| ticket.request).unwrap_or_default();
                say(&Reply::Lost { request });
            }
        },
    )
}
