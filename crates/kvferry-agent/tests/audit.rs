//! Wrong bytes have nowhere to hide: faults put in on purpose, and what audits make of them.

mod common;

use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::faulty::{Fault, Switch};
use common::*;
use kvferry_agent::{Audit, Failure, Loss, Outcome};
use kvferry_layout::Manifest;

const SOURCE: [u32; 3] = [3, 6, 12];
const DESTINATION: [u32; 3] = [9, 5, 20];
const TOKENS: u64 = 12;

/// What came of requests with a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// Wrong bytes were used.
    used: u32,
    /// The audit found them.
    caught: u32,
    /// The pair was not served any more.
    refused: u32,
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self { used: 0, refused: 0, .. } => f.write_str("all caught"),
            Self { used: 0, .. } => f.write_str("all caught, then the pair is refused"),
            Self { caught: 0, refused: 0, .. } => f.write_str("**used**"),
            _ => f.write_str("some used"),
        }
    }
}

/// How a pair goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// On the way.
    Way(Fault),
    /// The manifest that the other side plans by has another stride than the rank's own.
    StrideOnTheWay,
    /// The rank itself believes in another stride than its memory has.
    StrideBelieved,
}

struct Pair {
    p: Engine,
    d: Engine,
    switch: Switch,
    next: Mutex<u64>,
}

impl Pair {
    fn new(by: By, audit: Audit, wrong: Option<Wrong>) -> Self {
        let mut p = Recipe::new("p", 2).by(by);
        p.by_head = wrong == Some(Wrong::StrideBelieved);
        let p = p.start();
        if wrong == Some(Wrong::StrideOnTheWay) {
            let cards = p.ranks.iter().map(|rank| {
                let mut card = rank.worker.card().unwrap();
                let mut draft = Manifest::from_bytes(&card.manifest).unwrap().into_draft();
                let view = &mut draft.groups[0].pieces[0].view;
                (view.entry, view.axes) = (DIM, vec![TOKENS_PER_BLOCK * DIM, 1]);
                card.manifest = Manifest::new(draft).unwrap().to_bytes();
                card
            });
            p.scheduler.publish(cards.collect()).unwrap();
        }
        let mut d = Recipe::new("d", 1).by(by).audit(audit);
        d.faulty = matches!(by, By::Tcp | By::Local | By::Nixl);
        let switch = d.switch.clone();
        Self { p, d: d.start(), switch, next: Mutex::new(0) }
    }

    /// Hands one request over, each with other bytes than the one before: its number, and its outcome.
    fn hand_over(&self) -> (u64, Outcome) {
        let number = {
            let mut next = self.next.lock().unwrap();
            *next += 1;
            *next
        };
        let name = format!("r{number}");
        self.p.prefill(number, &SOURCE, TOKENS);
        let ticket = self.p.grant(&name, &SOURCE, TOKENS);
        self.d.start_load(&name, &ticket, &SOURCE, &DESTINATION, TOKENS, LONG);
        (number, self.d.wait_ends(&name).remove(0))
    }

    fn request(&self, tally: &mut Tally) {
        let (number, outcome) = self.hand_over();
        let wrong = self.d.ranks[0].wrong(number, &DESTINATION, TOKENS);
        match outcome {
            Outcome::Done => tally.used += u32::from(wrong > 0),
            Outcome::Failed(Failure::Mismatch(what)) => {
                assert_ne!(wrong, 0, "a false alarm: {what}");
                assert!(what.starts_with("layers.0/kv, read from rank "), "{what}");
                assert!(
                    what.ends_with("(both sides keep still: it went wrong on the way)"),
                    "{what}"
                );
                tally.caught += 1;
            }
            Outcome::Failed(Failure::Refused(why)) => {
                assert!(why.contains("3 audits found other bytes"), "{why}");
                tally.refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }

    /// Requests with the fault at work, after `good` ones without it.
    fn tally(by: By, audit: Audit, wrong: Wrong, good: u32, faulty: u32) -> Tally {
        let pair = Self::new(by, audit, Some(wrong));
        let mut before = Tally::default();
        (0..good).for_each(|_| pair.request(&mut before));
        assert_eq!(before, Tally::default(), "{wrong:?}: nothing was wrong yet");
        if let Wrong::Way(fault) = wrong {
            *pair.switch.lock().unwrap() = Some(fault);
        }
        let mut tally = Tally::default();
        (0..faulty).for_each(|_| pair.request(&mut tally));
        tally
    }
}

/// All that move bytes here.
fn transports() -> [By; 3] {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: set before the library is loaded, by the first test that asks; nobody reads the
        // environment meanwhile.
        unsafe {
            std::env::set_var("UCX_NET_DEVICES", "lo");
            std::env::set_var("UCX_MEM_EVENTS", "n");
        }
    });
    [By::Local, By::Tcp, By::Nixl]
}

const ON_THE_WAY: [(&str, Wrong); 6] = [
    ("a flipped bit", Wrong::Way(Fault::FlippedBit)),
    ("a block swapped for another", Wrong::Way(Fault::SwappedBlocks)),
    ("a copy missing", Wrong::Way(Fault::MissingCopy)),
    ("a stale block", Wrong::Way(Fault::StaleBlock)),
    ("values in another order inside a page", Wrong::Way(Fault::OtherOrder)),
    ("a wrong stride in the manifest that the other side plans by", Wrong::StrideOnTheWay),
];

/// The table in docs/integrity.md is what happens. `UPDATE_DOCS=1` writes it anew.
#[test]
fn the_table_of_faults_is_true() {
    let mut table = String::from(
        "| fault | `off` | `0.01`, from the first request on | `0.01`, later | `all` |\n|---|---|---|---|---|\n",
    );
    let sampled = "1 % of such requests caught";
    for (name, wrong) in ON_THE_WAY {
        let mut rows = vec![];
        for by in transports() {
            let off = Pair::tally(by, Audit::OFF, wrong, 0, 5);
            let from_the_start = Pair::tally(by, Audit::SAMPLED, wrong, 0, 5);
            let all = match wrong {
                // It is there from the start.
                Wrong::StrideOnTheWay => Pair::tally(by, Audit::ALL, wrong, 0, 3),
                _ => Pair::tally(by, Audit::ALL, wrong, 4, 3),
            };
            assert_eq!(off, Tally { used: 5, ..Tally::default() }, "{name}: the danger is real");
            assert_eq!((from_the_start.used, from_the_start.caught), (0, 3), "{name}");
            assert_eq!(all, Tally { caught: 3, ..Tally::default() }, "{name}");
            rows.push([off, from_the_start, all].map(|tally| tally.to_string()));
        }
        assert!(rows.iter().all(|row| *row == rows[0]), "{name}: {rows:?}");
        let [off, start, all] = &rows[0];
        let later = if wrong == Wrong::StrideOnTheWay { "cannot begin later" } else { sampled };
        writeln!(table, "| {name} | {off} | {start} | {later} | {all} |").unwrap();
    }
    // What no digest can see: both sides take the rank at its word.
    let believed = Pair::tally(By::Tcp, Audit::ALL, Wrong::StrideBelieved, 0, 3);
    assert_eq!(believed, Tally { used: 3, ..Tally::default() });
    writeln!(
        table,
        "| a rank that is wrong about its own memory | {believed} | {believed} | {believed} | {believed} |"
    )
    .unwrap();
    compare_with_document(&table);
}

fn compare_with_document(table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/integrity.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("<!-- faults -->\n").expect("the table has a mark");
    let (shown, after) = rest.split_once("<!-- end of faults -->").expect("and an end");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let text = format!("{before}<!-- faults -->\n{table}<!-- end of faults -->{after}");
        std::fs::write(&path, text).unwrap();
        return;
    }
    assert_eq!(shown, table, "docs/integrity.md shows something else");
}

/// With every request audited nothing is wrong that is right. `KVFERRY_AUDITS=100000` makes more of it.
#[test]
fn no_false_alarm() {
    let count = std::env::var("KVFERRY_AUDITS").map_or(400, |count| count.parse().unwrap());
    let shapes = [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)];
    for (n, (from, to)) in shapes.into_iter().enumerate() {
        let p = Recipe::new("p", from).by(By::Looping).start();
        let mut d = Recipe::new("d", to).by(By::Looping).audit(Audit::ALL);
        d.by_head = n % 2 == 1;
        let d = d.start();
        let each = count / shapes.len() as u64;
        for number in 0..each {
            let (name, tokens) = (format!("r{number}"), 1 + number % 23);
            let shift = (number % 7) as u32;
            let (source, destination) =
                (blocks_for(tokens, 3 + shift), blocks_for(tokens, 20 + 3 * shift));
            if number % 50 == 0 {
                p.prefill(number, &source, tokens);
            }
            let ticket = p.grant(&name, &source, tokens);
            d.start_load(&name, &ticket, &source, &destination, tokens, LONG);
            for outcome in d.wait_ends(&name) {
                assert_eq!(outcome, Outcome::Done, "request {number} of {from} to {to}");
            }
            p.scheduler.released();
        }
        for rank in &d.ranks {
            let metrics = rank.worker.metrics();
            let line = |result: &str, n: u64| {
                let labels = format!(
                    "engine=\"d\",rank=\"{}\",result=\"{result}\"",
                    rank.heads.start / (HEADS / to)
                );
                format!("kvferry_audits_total{{{labels}}} {n}")
            };
            for line in [line("matched", each), line("mismatch", 0), line("unable", 0)] {
                assert!(metrics.lines().any(|found| found == line), "{line}\nis not in\n{metrics}");
            }
        }
    }
}

/// Memory that somebody writes to although it was promised, on either side: the error says whose.
#[test]
fn a_mismatch_says_whose_memory_changes() {
    for (who, words) in [("p", "the source's memory"), ("d", "this side's memory")] {
        let until = Instant::now() + LONG;
        let said = loop {
            assert!(Instant::now() < until, "{who}: it was never said");
            let pair = Pair::new(By::Local, Audit::ALL, None);
            let stop = AtomicBool::new(false);
            let (_, outcome) = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (engine, blocks) =
                        if who == "p" { (&pair.p, &SOURCE) } else { (&pair.d, &DESTINATION) };
                    for other in 1000.. {
                        engine.prefill(other, blocks, TOKENS);
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
                let outcome = pair.hand_over();
                stop.store(true, Ordering::Relaxed);
                outcome
            });
            // Not when it happened to keep still while it was looked at.
            if let Outcome::Failed(Failure::Mismatch(what)) = outcome
                && !what.contains("keep still")
            {
                break what;
            }
        };
        assert!(said.ends_with(&format!("({words} is changing)")), "{who}: {said}");
    }
}

/// Tables that were changed on the way are found by the lease, before anything is looked at.
#[test]
fn what_was_not_granted_is_not_looked_at() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).audit(Audit::ALL).start());
    p.prefill(1, &SOURCE, TOKENS);
    let ticket = p.grant("r", &SOURCE, TOKENS);
    d.start_load("r", &ticket, &[3, 12, 6], &DESTINATION, TOKENS, LONG);
    assert_eq!(d.wait_ends("r"), [Outcome::Expired(Loss::NotGranted)]);
    assert_eq!(p.counter("confirmations_not_granted"), 1);
}

/// A source that falls silent while it is asked: the load ends at its deadline, as for any dead peer.
#[test]
fn a_source_that_falls_silent_ends_the_load() {
    let p = Recipe::new("p", 1).by(By::Held).start();
    let d = Recipe::new("d", 1).by(By::Held).audit(Audit::ALL).start();
    let wire = Wire::to(p.scheduler.address());
    p.prefill(1, &SOURCE, TOKENS);
    let mut ticket = p.grant("r", &SOURCE, TOKENS);
    ticket.address = wire.address.clone();
    d.start_load("r", &ticket, &SOURCE, &DESTINATION, TOKENS, Duration::from_secs(8));
    let read = d.ranks[0].held.as_ref().unwrap().next();
    wire.stop();
    read.land(0, read.copies.len());
    read.finish();
    let late = Failure::Deadline { stage: "confirming".to_owned() };
    assert_eq!(d.wait_ends("r"), [Outcome::Failed(late)]);
    assert_eq!(d.ranks[0].worker.loads(), []);
}

/// A source that has no time to look at its memory, and one that has none for its own: what has landed is confirmed, and
/// used without an audit.
#[test]
fn what_takes_too_long_to_look_at_fails_no_load() {
    for slow in ["source", "destination"] {
        let p = Recipe::new("p", 1).by(By::Held).start();
        let d = Recipe::new("d", 1).by(By::Held).audit(Audit::ALL).start();
        p.prefill(1, &SOURCE, TOKENS);
        let ticket = p.grant("r", &SOURCE, TOKENS);
        let busy = &if slow == "source" { &p } else { &d }.ranks[0].held.as_ref().unwrap().busy;
        busy.store(true, Ordering::SeqCst);
        d.start_load("r", &ticket, &SOURCE, &DESTINATION, TOKENS, Duration::from_secs(6));
        let read = d.ranks[0].held.as_ref().unwrap().next();
        read.land(0, read.copies.len());
        read.finish();
        assert_eq!(d.wait_ends("r"), [Outcome::Done], "{slow}");
        let counts = d.ranks[0].worker.counts();
        assert!(counts.contains(&("audits_unable".to_owned(), 1)), "{slow}: {counts:?}");
    }
}

/// A rank of the source that cannot be asked, while its scheduler still answers for the blocks: what was read from it is
/// used without an audit.
#[test]
fn a_source_rank_that_is_gone_cannot_be_audited() {
    let mut p = Recipe::new("p", 1).by(By::Held).start();
    let d = Recipe::new("d", 1).by(By::Held).audit(Audit::ALL).start();
    p.prefill(1, &SOURCE, TOKENS);
    let ticket = p.grant("r", &SOURCE, TOKENS);
    d.start_load("r", &ticket, &SOURCE, &DESTINATION, TOKENS, LONG);
    let read = d.ranks[0].held.as_ref().unwrap().next();
    p.ranks.clear();
    read.land(0, read.copies.len());
    read.finish();
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    let counts = d.ranks[0].worker.counts();
    assert!(counts.contains(&("audits_unable".to_owned(), 1)), "{counts:?}");
}
