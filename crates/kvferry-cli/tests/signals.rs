//! Processes that are killed, or stand still for a while, in every state of a request.
//!
//! The engines are those of `kvferry demo`, one process for the scheduler and one for each rank; the
//! tests play the router and the supervisor.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Long enough for whatever must happen; a test that gets here has failed.
const LONG: Duration = Duration::from_secs(90);

/// Of engines.
#[derive(Clone, Copy)]
struct Times {
    /// Of a lease.
    term: Duration,
    handshake: Duration,
}

impl Times {
    fn new(term: Duration) -> Self {
        Self { term, handshake: LONG / 3 }
    }
}

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    said: Receiver<Value>,
}

impl Process {
    fn start(engine: &str, topology: &str, rank: Option<u32>, times: Times) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .arg("demo-process")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (tell, said) = mpsc::channel();
        let output = child.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                if tell.send(serde_json::from_str(&line).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut process = Self { input: child.stdin.take(), child, said };
        process.tell(json!({
            "model": "llama-3.1-8b", "layers": 2, "topology": topology, "engine": engine,
            "rank": rank, "transport": "tcp", "key": "a key for these tests", "audit": 0.0,
            "term_ms": times.term.as_millis(), "handshake_ms": times.handshake.as_millis(),
        }));
        process
    }

    fn tell(&mut self, command: Value) {
        // Nothing is heard by a process that is gone.
        if let Some(input) = &mut self.input {
            _ = writeln!(input, "{command}");
        }
    }

    /// The next thing of this kind that it says.
    fn hear(&self, kind: &str) -> Value {
        let until = Instant::now() + LONG;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let said =
                self.said.recv_timeout(left).unwrap_or_else(|_| panic!("never said: {kind}"));
            if said == kind {
                return said;
            }
            if let Some(found) = said.get(kind) {
                return found.clone();
            }
        }
    }

    /// That it says nothing of this kind for a while.
    fn is_silent(&self, kind: &str, time: Duration) {
        let until = Instant::now() + time;
        while let Ok(said) = self.said.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            assert!(said.get(kind).is_none(), "{said}");
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call; the child was not waited for, so that its number is its own.
        let sent = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(sent, 0);
    }

    /// Returns when every thread of it stands still.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stands_still = |task: std::io::Result<std::fs::DirEntry>| {
            // One that has ended stands still as well.
            let Ok(stat) = std::fs::read_to_string(task.unwrap().path().join("stat")) else {
                return true;
            };
            // The state follows the name, which is in brackets.
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        let tasks = || std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let until = Instant::now() + LONG;
        while !tasks().all(stands_still) {
            assert!(Instant::now() < until, "it does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

struct Engine {
    scheduler: Process,
    ranks: Vec<Process>,
}

impl Engine {
    fn start(name: &str, tp: u32, times: Times) -> Self {
        let topology = format!("tp={tp},blocks=64");
        let mut scheduler = Process::start(name, &topology, None, times);
        let start = |rank| Process::start(name, &topology, Some(rank), times);
        let ranks: Vec<Process> = (0..tp).map(start).collect();
        scheduler.hear("Address");
        let cards: Vec<Value> = ranks.iter().map(|rank| rank.hear("Card")).collect();
        scheduler.tell(json!({"Publish": {"cards": cards}}));
        scheduler.hear("Published");
        Self { scheduler, ranks }
    }
}

const TOKENS: u64 = 200;

fn table(first: u32) -> Value {
    json!([{"first": 0, "blocks": (first..first + TOKENS.div_ceil(16) as u32).collect::<Vec<_>>()}])
}

/// What P lets be read.
fn grant() -> Value {
    json!({"epoch": 0, "tokens": TOKENS, "tables": table(1)})
}

/// A prefill engine of two ranks, a decode engine of one, and a request that was prefilled.
struct Scene {
    p: Engine,
    d: Engine,
    ticket: Value,
}

impl Scene {
    fn new(term: Duration) -> Self {
        Self::with(Times::new(term))
    }

    fn with(times: Times) -> Self {
        let (p, d) = (Engine::start("p", 2, times), Engine::start("d", 1, times));
        let mut scene = Self { p, d, ticket: Value::Null };
        scene.prefill("r");
        scene
    }

    /// The same, between engines that know each other from a request before.
    fn warm(term: Duration) -> Self {
        let mut scene = Self::new(term);
        scene.load("r", LONG);
        scene.ends_well();
        scene.prefill("r");
        scene
    }

    fn prefill(&mut self, name: &str) {
        for rank in &mut self.p.ranks {
            rank.tell(json!({
                "Fill": {"request": name, "seed": 7, "tokens": TOKENS, "tables": table(1)}
            }));
            rank.hear("Filled");
        }
        self.p.scheduler.tell(json!({"Grant": {"request": name, "grant": grant()}}));
        self.ticket = self.p.scheduler.hear("Granted")["ticket"].clone();
    }

    fn load(&mut self, name: &str, deadline: Duration) {
        let deadline = json!({"secs": deadline.as_secs(), "nanos": deadline.subsec_nanos()});
        let load = json!({
            "request": name, "ticket": self.ticket, "grant": grant(), "tokens": TOKENS,
            "cached": [0], "destination": table(30), "rest": false,
            "deadline": deadline, "patience": deadline,
        });
        self.d.ranks[0].tell(json!({"Load": {"load": load, "seed": 7}}));
    }

    /// How the request ended: never with a wrong byte.
    fn end(&self) -> Value {
        let end = self.d.ranks[0].hear("Ended");
        assert_eq!(end["wrong"], 0);
        end
    }

    fn ends_well(&mut self) {
        let end = self.end();
        assert_eq!(end["outcome"], "Done");
        assert!(end["compared"].as_u64().unwrap() > 0);
        assert_eq!(self.p.scheduler.hear("Released")["why"], "confirmed");
        self.nothing_else_changed();
    }

    /// The request fails because its time is up while it is doing this.
    fn fails_late(&mut self, doing: &str) {
        assert_eq!(self.failure(), json!({"Deadline": {"stage": doing}}));
    }

    /// The request fails, and this is why.
    fn fails(&mut self, why: &str) {
        let failure = self.failure();
        assert!(failure.get(why).is_some(), "not {why}: {failure}");
    }

    fn failure(&mut self) -> Value {
        let end = self.end();
        let failure = &end["outcome"]["Failed"];
        assert!(failure.is_object(), "{end}");
        if end["quarantined"] == true {
            self.d.ranks[0].hear("Settled");
        }
        self.nothing_else_changed();
        failure.clone()
    }

    fn nothing_else_changed(&mut self) {
        self.d.ranks[0].tell(json!("Audit"));
        assert_eq!(self.d.ranks[0].hear("Audited")["wrong"], 0);
    }

    fn p_has_its_blocks_back(&self, why: &str) {
        assert_eq!(self.p.scheduler.hear("Released")["why"], why);
    }

    /// The request is being read: a rank of P stands still, and bytes do not come.
    fn reading(&mut self, patience: Duration) {
        self.p.ranks[1].stop();
        self.load("r", patience);
        self.d.ranks[0].is_silent("Ended", Duration::from_millis(500));
    }

    /// All bytes are there; the prefill engine's scheduler stands still.
    fn confirming(&mut self, patience: Duration) {
        self.reading(patience);
        self.p.scheduler.stop();
        self.p.ranks[1].go_on();
        self.d.ranks[0].is_silent("Ended", Duration::from_millis(500));
    }
}

#[test]
fn a_prefill_rank_is_killed_before_it_is_read() {
    let mut scene = Scene::new(LONG);
    scene.p.ranks[1].kill();
    scene.load("r", LONG);
    scene.fails("PeerGone");
    scene.p_has_its_blocks_back("abandoned");
}

#[test]
fn a_prefill_rank_stands_still_in_the_handshake() {
    let mut scene = Scene::new(LONG);
    scene.reading(LONG);
    scene.p.ranks[1].go_on();
    scene.ends_well();
}

#[test]
fn a_prefill_rank_is_killed_while_it_is_read() {
    let mut scene = Scene::warm(LONG);
    scene.reading(LONG);
    scene.p.ranks[1].kill();
    scene.fails("PeerGone");
    scene.p_has_its_blocks_back("abandoned");
}

#[test]
fn a_prefill_rank_stands_still_while_it_is_read() {
    let mut scene = Scene::warm(LONG);
    scene.reading(LONG);
    scene.p.ranks[1].go_on();
    scene.ends_well();
}

#[test]
fn a_prefill_rank_stands_still_for_too_long() {
    let mut scene = Scene::warm(LONG);
    scene.reading(Duration::from_secs(10));
    scene.fails_late("reading");
    // Late bytes find nothing of this request any more.
    scene.p.ranks[1].go_on();
    thread::sleep(Duration::from_millis(300));
    scene.nothing_else_changed();
    scene.p_has_its_blocks_back("abandoned");
    scene.prefill("again");
    scene.load("again", LONG);
    scene.ends_well();
}

#[test]
fn the_prefill_scheduler_stands_still_before_the_handshake() {
    let mut scene = Scene::new(LONG);
    scene.p.scheduler.stop();
    scene.load("r", LONG);
    scene.d.ranks[0].is_silent("Ended", Duration::from_millis(500));
    scene.p.scheduler.go_on();
    scene.ends_well();
}

#[test]
fn the_prefill_scheduler_is_killed_before_the_handshake() {
    let handshake = Duration::from_secs(5);
    let mut scene = Scene::with(Times { handshake, ..Times::new(LONG) });
    scene.p.scheduler.kill();
    scene.load("r", LONG);
    scene.fails("PeerGone");
}

#[test]
fn the_prefill_scheduler_stands_still_while_it_is_asked() {
    let mut scene = Scene::warm(LONG);
    scene.confirming(LONG);
    scene.p.scheduler.go_on();
    scene.ends_well();
}

#[test]
fn the_prefill_scheduler_is_killed_while_it_is_asked() {
    let mut scene = Scene::warm(LONG);
    scene.confirming(Duration::from_secs(15));
    scene.p.scheduler.kill();
    // Every byte is there and right, and must not be used: nobody can say so.
    scene.fails_late("confirming");
}

#[test]
fn the_decode_rank_is_killed_while_it_reads() {
    let term = Duration::from_secs(10);
    let mut scene = Scene::warm(term);
    scene.reading(LONG);
    scene.d.ranks[0].kill();
    scene.p_has_its_blocks_back("expired");
    scene.p.ranks[1].go_on();
    scene.d = Engine::start("d", 1, Times::new(term));
    scene.prefill("again");
    scene.load("again", LONG);
    scene.ends_well();
}

#[test]
fn the_decode_rank_stands_still_until_the_lease_is_gone() {
    let mut scene = Scene::warm(Duration::from_secs(10));
    scene.reading(LONG);
    scene.d.ranks[0].stop();
    scene.p.ranks[1].go_on();
    scene.p_has_its_blocks_back("expired");
    for rank in &mut scene.p.ranks {
        rank.tell(json!({"Scrub": {"request": "r", "tables": table(1)}}));
        rank.hear("Scrubbed");
    }
    scene.d.ranks[0].go_on();
    let end = scene.end();
    assert!(end["outcome"].get("Expired").is_some(), "{end}");
    scene.nothing_else_changed();
}

#[test]
fn the_decode_scheduler_is_killed_while_a_request_waits() {
    let mut scene = Scene::new(Duration::from_secs(10));
    let hold = json!({"Hold": {"ticket": scene.ticket, "patience_ms": 60_000}});
    scene.d.scheduler.tell(hold);
    scene.p.scheduler.is_silent("Released", Duration::from_secs(14));
    scene.d.scheduler.kill();
    scene.p_has_its_blocks_back("expired");
}

/// The processes of a demo whose parent is killed do not stay behind.
#[test]
fn processes_end_with_whoever_started_them() {
    let mut process = Process::start("p", "tp=1,blocks=64", None, Times::new(LONG));
    process.hear("Address");
    drop(process.input.take());
    let until = Instant::now() + LONG;
    while process.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it stays");
        thread::sleep(Duration::from_millis(10));
    }
}
