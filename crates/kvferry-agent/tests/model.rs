//! Every state that one prefill engine and two decode ranks can get into, under loss, duplication and
//! reordering of every message, crashes of either side, and a clock that may run at any pace.
//!
//! The two state machines are the ones that serve. Around them is the worst world that the promises
//! allow: a message that was ever sent may be delivered at any time and any number of times, or
//! never; P overwrites a block the moment it is free; a cancelled read goes on landing until its
//! transport says that it has settled; the request keeps its name when it is served again; a decode
//! rank may start over under its old name. P may compute while ranks follow: a word at a time, starting
//! over in a block that others have overwritten meanwhile. Or it says what it is about to complete and, layer by
//! layer, what it has written, which may be heard at any time from then on. Ranks come early, late or in between, with a
//! ticket or with nothing but a name, which may be used again; and a client may forge the tables, or send
//! a ticket with another prompt than its own.
//!
//! Shown in every state: what is used was read under a confirmed lease (invariant 3), nothing lands
//! in a block that was handed back (4), when nothing more is delivered and time passes, all blocks are
//! back on both sides and nothing is remembered (7), and what is used is what P granted (8). Where every
//! load is audited, that holds even if the network changes what it carries. Each
//! safeguard is then taken away, and the check must find the damage.
//!
//! One long file on purpose: the world, its moves and its promises are one argument, to be read at once.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kvferry_agent::follow::{Follower, Pace, Part};
use kvferry_agent::lease::{Answer, Consumer, LeaseKey, Leases};
use kvferry_agent::life::{Action, Event, Life, Stage};
use kvferry_agent::{BlockTable, Claim, Failure, Fingerprint, Grant, InFlight, Loss, Origin};

const RANKS: usize = 2;
const REQUEST: &str = "request";
const NAME: &str = "name";
const SCRAP: u8 = 0;
/// What a network makes of a word.
const CORRUPT: u8 = u8::MAX - 1;
/// What P's other block holds: another user's prompt.
const FOREIGN: u8 = u8::MAX;

/// A safeguard that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// D uses what it read without asking.
    NoConfirmation,
    /// P counts confirmations, whoever sends them.
    CountByNumber,
    /// P does not look at which life of a request a message is for.
    NoNonce,
    /// P gives the answer to one attempt to another.
    NoAttempt,
    /// D hands blocks back when it has asked for its reads to stop.
    HandBackOnCancel,
    /// P never ends a lease by itself.
    NoExpiry,
    /// A restarted P answers for leases of its earlier life.
    NoIncarnation,
    /// D does not say by which tables it read.
    NoFingerprint,
    /// D does not say what it reads for.
    NoOrigin,
    /// P does not tell followers that it has started over.
    NoEpoch,
    /// D keeps what it read before P started over.
    KeepsOldEpoch,
    /// D reads on while what it asked for last may still land.
    ReadsOverLateWords,
    /// P lets be read, and confirms, as if what is complete so far were all.
    NoSeal,
    /// D asks by the name even when it knows which lease it has begun to read.
    FollowsTheName,
    /// D reads what P is about to complete before it hears that it is written.
    BelievesThePromise,
    /// P says that a layer is written before it is.
    SpeaksTooEarly,
    /// D does not look at which step a word is about.
    NoStep,
    /// D does not compare what it has with what P holds.
    NoAudit,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Extend {
        grant: u8,
    },
    Confirm {
        grant: u8,
        rank: u8,
        attempt: u8,
        read_by: Fingerprint,
        swapped: bool,
    },
    Answer {
        rank: u8,
        attempt: u8,
        answer: Answer,
    },
    /// What is in P's block that this lease is about?
    Ask {
        grant: u8,
        rank: u8,
        attempt: u8,
        read_by: Fingerprint,
    },
    /// `None`: the lease is not held.
    Digest {
        rank: u8,
        attempt: u8,
        words: Option<[u8; 2]>,
    },
    Abandon {
        grant: u8,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Question {
    None,
    Asked,
    /// `None`: the lease is not held.
    Answered(Option<Told>),
}

/// What P says of a growing lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Told {
    grant: u8,
    epoch: u8,
    words: u8,
    /// The step in flight; 0: none is known.
    step: u8,
    sealed: bool,
}

/// One decode rank: a process with one block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rank {
    /// Attempts started, over all its lives.
    attempts: u8,
    load: Option<Load>,
    /// A read that the transport has not settled: it can land.
    reading: Option<Reading>,
    /// The two words of its block, and for which attempt it is kept.
    words: [u8; 2],
    kept_for: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Load {
    life: Life,
    /// The ticket that it has; 0: only the name.
    grant: u8,
    attempt: u8,
    /// A client has put another block into its tables.
    forged: bool,
    /// A client has sent its ticket with another prompt.
    swapped: bool,
    follower: Follower,
    /// The question how far P is. Its answer comes on the connection that it was asked on: late or not
    /// at all, but not twice.
    question: Question,
    /// What it reads now.
    part: Option<Part>,
    /// The step in flight that it has heard of.
    step: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reading {
    attempt: u8,
    forged: bool,
    /// The words that it reads, and which of them have landed.
    words: [bool; 2],
    landed: [bool; 2],
}

impl Reading {
    fn whole(&self) -> bool {
        self.words == self.landed
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    leases: Leases,
    now: u8,
    /// Leases granted, over all lives of P; also the value that P's block then holds.
    grants: u8,
    /// Grants before this one are of an earlier life of P.
    born: u8,
    /// P's block: free, or of a grant.
    block: Option<u8>,
    words: [u8; 2],
    /// How often P may still start the request over, while it computes it.
    computing: Option<u8>,
    /// The last step that P has begun, where it speaks of layers, and all that was said: which layer was
    /// written in which step.
    step: u8,
    said: BTreeSet<(u8, u8)>,
    ranks: [Rank; RANKS],
    sent: BTreeSet<Message>,
}

struct Bounds {
    grants: u8,
    /// For each rank.
    attempts: [u8; RANKS],
    ticks: u8,
    restarts: u8,
    /// Whether a client may change tables on their way to D.
    forgery: bool,
    /// Whether a client may send a ticket with another prompt.
    swaps: bool,
    /// Whether a word may arrive as another; if so, every load is audited.
    corruption: bool,
    /// P computes word by word, and starts over at most this often; `None`: all at once.
    growth: Option<u8>,
    /// If so, its words are the layers of one token, and it speaks of each.
    layers: bool,
    /// Whether ranks may know nothing but the name.
    names: bool,
    fault: Fault,
}

fn at(tick: u8) -> Duration {
    Duration::from_secs(u64::from(tick))
}

fn key(grant: u8) -> LeaseKey {
    LeaseKey { request: REQUEST.to_owned(), nonce: u64::from(grant) }
}

/// What P grants when so many words are complete, or what a client makes of it.
fn tables(epoch: u8, words: u8, forged: bool) -> Grant {
    let table = BlockTable { first: u64::from(forged), blocks: (0..words.into()).collect() };
    Grant { epoch: epoch.into(), tokens: words.into(), tables: vec![table] }
}

/// The same where the words are layers of one token, which has a block before it is complete.
fn table_of_one(epoch: u8, tokens: u8) -> Grant {
    Grant { tokens: tokens.into(), ..tables(epoch, 1, false) }
}

/// What P has computed, or what a client makes of it.
fn origin(swapped: bool) -> Origin {
    Origin([u8::from(swapped); 16])
}

impl World {
    fn new() -> Self {
        let rank =
            Rank { attempts: 0, load: None, reading: None, words: [SCRAP; 2], kept_for: None };
        Self {
            leases: Leases::new(at(1), at(2)),
            now: 0,
            grants: 0,
            born: 0,
            block: None,
            words: [SCRAP; 2],
            computing: None,
            step: 0,
            said: BTreeSet::new(),
            ranks: [rank.clone(), rank],
            sent: BTreeSet::new(),
        }
    }

    /// Every world that can follow, with what led there; `Err` says what went wrong on the way.
    fn next(&self, bounds: &Bounds) -> Vec<(String, Result<Self, String>)> {
        let mut next = vec![];
        let mut step = |name: String, then: &dyn Fn(&mut Self) -> Result<(), String>| {
            let mut world = self.clone();
            let result = then(&mut world).map(|()| world);
            if result.as_ref() != Ok(self) {
                next.push((name, result));
            }
        };

        if self.block.is_none() && self.grants < bounds.grants {
            match bounds.growth {
                None => step("P grants".into(), &|w| {
                    w.grants += 1;
                    (w.block, w.words) = (Some(w.grants), [w.grants; 2]);
                    let (tables, origin) = (tables(0, 2, false), Some(origin(false)));
                    let granted = w.leases.grant(key(w.grants), tables, origin, at(w.now));
                    granted.map_err(|e| e.to_string())
                }),
                Some(restarts) => step("P begins".into(), &|w| {
                    w.grants += 1;
                    (w.block, w.words) = (Some(w.grants), [SCRAP; 2]);
                    w.computing = Some(restarts);
                    // When it began changes nothing.
                    let begun = w.leases.begin(key(w.grants), Some(NAME), at(0));
                    begun.map_err(|e| e.to_string())?;
                    if bounds.layers {
                        w.promise();
                    }
                    Ok(())
                }),
            }
        }
        if let Some(restarts) = self.computing {
            if bounds.layers {
                let next = self.words.iter().position(|word| *word == SCRAP);
                match next {
                    Some(layer) => step(format!("P writes layer {layer}"), &|w| {
                        w.words[layer] = w.grants;
                        Ok(())
                    }),
                    None => step("P has computed all".into(), &|w| {
                        w.computing = None;
                        let (tables, origin) = (table_of_one(0, 1).tables, Some(origin(false)));
                        if w.leases.seal(REQUEST, 1, tables, origin, at(w.now)).is_err() {
                            (w.block, w.words) = (None, [SCRAP; 2]);
                        }
                        Ok(())
                    }),
                }
                for layer in 0..2 {
                    let written = self.words[layer] != SCRAP;
                    if written || bounds.fault == Fault::SpeaksTooEarly {
                        step(format!("P says that layer {layer} is written"), &|w| {
                            w.said.insert((w.step, layer as u8));
                            Ok(())
                        });
                    }
                }
            } else if self.words[0] == SCRAP {
                step("P has computed a word".into(), &|w| {
                    w.words[0] = w.grants;
                    w.grow(1);
                    Ok(())
                });
            } else {
                step("P has computed all".into(), &|w| {
                    w.words[1] = w.grants;
                    w.computing = None;
                    let tables = tables(0, 2, false).tables;
                    if w.leases.seal(REQUEST, 2, tables, Some(origin(false)), at(w.now)).is_err() {
                        // Nobody wants it: the block is free at once.
                        (w.block, w.words) = (None, [SCRAP; 2]);
                    }
                    Ok(())
                });
            }
            if restarts > 0 {
                step("P starts over".into(), &|w| {
                    w.computing = Some(restarts - 1);
                    w.words = [SCRAP; 2];
                    if bounds.fault != Fault::NoEpoch {
                        _ = w.leases.restart(REQUEST);
                    }
                    if bounds.layers {
                        w.promise();
                    }
                    Ok(())
                });
            }
            step("P gives up".into(), &|w| {
                w.leases.revoke(REQUEST, at(w.now));
                (w.block, w.words, w.computing) = (None, [SCRAP; 2], None);
                Ok(())
            });
        }
        if self.now < bounds.ticks {
            step("P's clock ticks".into(), &|w| {
                w.now += 1;
                if bounds.fault != Fault::NoExpiry {
                    w.leases.expire(at(w.now));
                }
                w.reuse();
                Ok(())
            });
        }
        if self.born < bounds.restarts && self.grants > self.born {
            step("P restarts".into(), &|w| {
                w.born = w.grants;
                w.leases = Leases::new(at(1), at(2));
                if bounds.fault == Fault::NoIncarnation {
                    // It numbers its leases from the start again.
                    w.grants = 0;
                    w.born = 0;
                }
                (w.block, w.words, w.computing) = (None, [SCRAP; 2], None);
                Ok(())
            });
        }
        for message in &self.sent {
            step(format!("delivered: {message:?}"), &|w| w.deliver(message, bounds));
        }
        for r in 0..RANKS {
            let rank = &self.ranks[r];
            if rank.kept_for.is_none() && rank.attempts < bounds.attempts[r] {
                let forged = [false, true].into_iter().take(1 + usize::from(bounds.forgery));
                let tickets = (1..=self.grants).flat_map(|g| forged.clone().map(move |f| (g, f)));
                let name = bounds.names.then_some((0, false));
                let swapped = [false, true].into_iter().take(1 + usize::from(bounds.swaps));
                let all = tickets.chain(name).flat_map(|(grant, forged)| {
                    swapped.clone().map(move |swapped| (grant, forged, swapped))
                });
                for (grant, forged, swapped) in all {
                    let mut how = match (grant, forged) {
                        (0, _) => "what has the name".to_owned(),
                        (_, true) => format!("grant {grant} by forged tables"),
                        (_, false) => format!("grant {grant}"),
                    };
                    if swapped {
                        how.push_str(" for another prompt");
                    }
                    step(format!("D{r} loads {how}"), &|w| {
                        let rank = &mut w.ranks[r];
                        rank.attempts += 1;
                        let attempt = rank.attempts;
                        rank.kept_for = Some(attempt);
                        rank.words = [SCRAP; 2];
                        rank.load = Some(Load {
                            life: Life::default(),
                            grant,
                            attempt,
                            forged,
                            swapped,
                            follower: follower(bounds, forged),
                            question: Question::None,
                            part: None,
                            step: 0,
                        });
                        if grant > 0 {
                            w.sent.insert(Message::Extend { grant });
                        }
                        Ok(())
                    });
                }
            }
            if let Some(load) = &rank.load {
                let following = load.life.stage() == &Stage::Following;
                match load.question {
                    Question::None
                        if bounds.fault == Fault::ReadsOverLateWords && rank.reading.is_some() =>
                    {
                        step(format!("D{r} asks while it reads"), &|w| {
                            w.follow(r);
                            Ok(())
                        });
                    }
                    Question::None => {}
                    Question::Asked => step(format!("P tells D{r} how far it is"), &|w| {
                        w.tell(r, bounds);
                        Ok(())
                    }),
                    Question::Answered(told) => {
                        if following || bounds.fault == Fault::ReadsOverLateWords {
                            step(format!("D{r} hears {told:?}"), &|w| w.hear(r, told, bounds));
                        }
                    }
                }
                for (of, layer) in &self.said {
                    step(format!("D{r} hears that layer {layer} of step {of} is written"), &|w| {
                        w.hear_word(r, *of, *layer, bounds)
                    });
                }
                // That a read breaks is below, where reads are.
                for event in [Event::Admitted, Event::Known, Event::Abort, Event::Deadline] {
                    step(format!("D{r}: {event:?}"), &|w| w.happen(r, event.clone(), bounds));
                }
                step(format!("D{r} crashes"), &|w| {
                    let rank = &mut w.ranks[r];
                    (rank.load, rank.reading, rank.kept_for) = (None, None, None);
                    rank.words = [SCRAP; 2];
                    Ok(())
                });
            }
            if let Some(reading) = &rank.reading {
                for word in (0..2).filter(|&word| reading.words[word]) {
                    step(format!("word {word} lands on D{r}"), &|w| {
                        let rank = &mut w.ranks[r];
                        if rank.kept_for != Some(reading.attempt) {
                            return Err(format!(
                                "a late word lands in a block of D{r} in other use"
                            ));
                        }
                        rank.words[word] = if reading.forged { FOREIGN } else { w.words[word] };
                        if let Some(reading) = &mut rank.reading {
                            reading.landed[word] = true;
                        }
                        Ok(())
                    });
                }
                if bounds.corruption && !reading.landed[0] {
                    step(format!("a word lands corrupted on D{r}"), &|w| {
                        let rank = &mut w.ranks[r];
                        if rank.kept_for == Some(reading.attempt) && reading.words[0] {
                            rank.words[0] = CORRUPT;
                            if let Some(reading) = &mut rank.reading {
                                reading.landed[0] = true;
                            }
                        }
                        Ok(())
                    });
                }
                let whole = reading.whole();
                step(format!("D{r}'s read settles"), &|w| {
                    w.ranks[r].reading = None;
                    let reads = w.ranks[r].load.as_ref();
                    let reads = reads.is_some_and(|l| l.attempt == reading.attempt);
                    match (reads, whole) {
                        (false, _) => Ok(()),
                        // The transport does not know that the load may have ended.
                        (true, true) => w.happen(r, Event::Arrived, bounds),
                        (true, false) => {
                            let failure = Failure::Transport("peer lost".into());
                            w.happen(r, Event::Settled, bounds)?;
                            w.happen(r, Event::Failed(failure), bounds)
                        }
                    }
                });
            }
        }
        next
    }

    /// P tells followers how far it is.
    fn grow(&mut self, words: u8) {
        // Without a lease nobody wants it any more.
        _ = self.leases.advance(REQUEST, words.into(), tables(0, words, false).tables);
    }

    /// P says what it is about to complete.
    fn promise(&mut self) {
        self.step += 1;
        let in_flight = InFlight { step: self.step.into(), tokens: 1 };
        _ = self.leases.advance_with(REQUEST, 0, table_of_one(0, 0).tables, &[in_flight]);
    }

    /// A rank asks P how far it is.
    fn follow(&mut self, r: usize) {
        if let Some(load) = &mut self.ranks[r].load {
            load.question = Question::Asked;
        }
    }

    /// P answers that.
    fn tell(&mut self, r: usize, bounds: &Bounds) {
        let Some(load) = &mut self.ranks[r].load else { return };
        let mut nonce = u64::from(load.grant);
        if load.grant == 0 || bounds.fault == Fault::FollowsTheName {
            // Of a name that P has not heard of it says nothing.
            let Some(found) = self.leases.named(NAME) else { return };
            nonce = found.nonce;
        }
        let told = self.leases.frontier(REQUEST).filter(|told| told.nonce == nonce);
        load.question = Question::Answered(told.map(|told| Told {
            grant: nonce as u8,
            epoch: told.grant.epoch as u8,
            words: told.grant.tokens as u8,
            step: told.in_flight.last().map_or(0, |last| last.step as u8),
            sealed: told.sealed || (bounds.fault == Fault::NoSeal && told.grant.tokens > 0),
        }));
    }

    /// The rank hears the answer.
    fn hear(&mut self, r: usize, told: Option<Told>, bounds: &Bounds) -> Result<(), String> {
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        load.question = Question::None;
        let Some(told) = told else {
            return self.happen(r, Event::NotHeld(Loss::Unknown), bounds);
        };
        load.grant = told.grant;
        let mut grant = match bounds.layers {
            true => table_of_one(told.epoch, told.words),
            false => tables(told.epoch, told.words, load.forged),
        };
        load.step = told.step;
        let in_flight = InFlight { step: told.step.into(), tokens: 1 };
        let in_flight = if told.step > 0 { vec![in_flight] } else { vec![] };
        if bounds.fault == Fault::KeepsOldEpoch {
            grant.epoch = load.follower.grant().epoch;
        }
        if load.follower.hear(grant, in_flight, told.sealed).is_err() {
            let failure = Failure::Transport("contradiction".into());
            return self.happen(r, Event::Failed(failure), bounds);
        }
        if bounds.fault == Fault::BelievesThePromise && told.step > 0 {
            load.follower.written(told.step.into(), [0, 1]);
        }
        match self.choose(r) {
            Some(last) => self.happen(r, Event::Grown { last }, bounds),
            None => {
                self.follow(r);
                Ok(())
            }
        }
    }

    /// The rank hears that a layer was written in a step, whatever it does at the moment.
    fn hear_word(&mut self, r: usize, step: u8, layer: u8, bounds: &Bounds) -> Result<(), String> {
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        let step = if bounds.fault == Fault::NoStep { load.step } else { step };
        load.follower.written(step.into(), [usize::from(layer)]);
        if load.life.stage() != &Stage::Following {
            return Ok(());
        }
        match self.choose(r) {
            Some(last) => self.happen(r, Event::Grown { last }, bounds),
            None => Ok(()),
        }
    }

    /// Chooses what a rank reads next, if there is anything: whether it is the last.
    fn choose(&mut self, r: usize) -> Option<bool> {
        let load = self.ranks[r].load.as_mut()?;
        load.part = load.follower.next();
        load.part.as_ref().map(|part| part.last)
    }

    /// A free block of P is overwritten at once.
    fn reuse(&mut self) {
        for _ in self.leases.take_released() {
            (self.block, self.words) = (None, [SCRAP; 2]);
        }
    }

    fn deliver(&mut self, message: &Message, bounds: &Bounds) -> Result<(), String> {
        // Each message says which life of P it is for.
        let current = |grant: &u8| *grant > self.born;
        match message {
            Message::Extend { grant } if current(grant) => {
                let grant = self.heard(*grant, bounds);
                self.leases.extend(&key(grant), at(self.now));
            }
            Message::Abandon { grant } if current(grant) => {
                let grant = self.heard(*grant, bounds);
                self.leases.abandon(&key(grant), at(self.now));
            }
            Message::Confirm { grant, rank, attempt, read_by, swapped } => {
                let answer = if current(grant) {
                    let grant = self.heard(*grant, bounds);
                    let consumer = |rank| {
                        let attempt = match bounds.fault {
                            Fault::NoAttempt => 0,
                            _ => u64::from(*attempt),
                        };
                        Consumer { engine: "d".into(), rank, ranks: 2, attempt }
                    };
                    let given = *read_by;
                    let claim = match bounds.fault {
                        Fault::NoFingerprint => Claim::Nothing,
                        Fault::NoOrigin => Claim::Tables(*read_by),
                        _ => Claim::All(*read_by, Some(origin(*swapped))),
                    };
                    let rank = u32::from(*rank);
                    let mut answer =
                        self.leases.confirm(&key(grant), &consumer(rank), claim, at(self.now));
                    let frontier = self.leases.frontier(REQUEST);
                    if bounds.fault == Fault::NoSeal
                        && frontier.is_some_and(|so_far| so_far.grant.fingerprint() == given)
                    {
                        answer = Answer::Held;
                    }
                    let open = self.leases.open() == 1;
                    if bounds.fault == Fault::CountByNumber && open && answer == Answer::Held {
                        // As if the next one counted, whoever sends it.
                        let attempt = *attempt;
                        let (read_by, swapped) = (given, *swapped);
                        let again = Message::Confirm { grant, rank: 2, attempt, read_by, swapped };
                        if !self.sent.insert(again) {
                            let other = consumer(1 - rank);
                            self.leases.confirm(&key(grant), &other, claim, at(self.now));
                        }
                    }
                    answer
                } else {
                    Answer::NotHeld(Loss::Restarted)
                };
                self.reuse();
                if usize::from(*rank) < RANKS {
                    let (rank, attempt) = (*rank, *attempt);
                    self.sent.insert(Message::Answer { rank, attempt, answer });
                }
            }
            Message::Answer { rank, attempt, answer } => {
                let rank = usize::from(*rank);
                let asked = self.ranks[rank].load.as_ref();
                if asked.is_some_and(|load| load.attempt == *attempt) {
                    let event = match answer {
                        Answer::Held => Event::Held,
                        Answer::NotHeld(loss) => Event::NotHeld(*loss),
                    };
                    self.happen(rank, event, bounds)?;
                }
            }
            Message::Ask { grant, rank, attempt, read_by } => {
                let frontier = self.leases.frontier(REQUEST).filter(|so_far| {
                    let asked = (so_far.nonce, so_far.sealed, so_far.grant.fingerprint());
                    asked == (u64::from(*grant), true, *read_by)
                });
                let words = frontier.filter(|_| current(grant)).map(|_| self.words);
                let (rank, attempt) = (*rank, *attempt);
                self.sent.insert(Message::Digest { rank, attempt, words });
            }
            Message::Digest { rank, attempt, words } => {
                let r = usize::from(*rank);
                let own = self.ranks[r].words;
                let asked = self.ranks[r].load.as_ref();
                let asked = asked.filter(|load| load.life.stage() == &Stage::Auditing);
                if asked.is_some_and(|load| load.attempt == *attempt) {
                    let event = match words {
                        None => Event::NotHeld(Loss::Unknown),
                        Some(words) if *words == own => Event::Passed,
                        Some(_) => Event::Failed(Failure::Mismatch("a word".into())),
                    };
                    self.happen(r, event, bounds)?;
                }
            }
            _ => {}
        }
        self.reuse();
        Ok(())
    }

    /// Which grant P takes a message to be about.
    fn heard(&self, grant: u8, bounds: &Bounds) -> u8 {
        match (bounds.fault, self.block) {
            (Fault::NoNonce, Some(block)) => block,
            _ => grant,
        }
    }

    fn happen(&mut self, r: usize, event: Event, bounds: &Bounds) -> Result<(), String> {
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        if let (Event::Arrived, Some(part)) = (&event, &load.part) {
            load.follower.arrived(part);
        }
        let (grant, attempt, forged) = (load.grant, load.attempt, load.forged);
        let swapped = load.swapped;
        for action in load.life.on(event) {
            let rank = &mut self.ranks[r];
            match action {
                Action::ShakeHands => {}
                Action::Follow => match self.choose(r) {
                    Some(last) => self.happen(r, Event::Grown { last }, bounds)?,
                    None => self.follow(r),
                },
                Action::Read => {
                    let part = rank.load.as_ref().and_then(|load| load.part.as_ref());
                    let new = part.map_or(0..0, |part| part.held..part.tokens);
                    let layers = part.and_then(|part| part.layers.as_ref());
                    let words = match (bounds.layers, layers) {
                        (true, Some(layers)) => [0, 1].map(|layer| layers.contains(&layer)),
                        (true, None) => [!new.is_empty(); 2],
                        (false, _) => [new.contains(&0), new.contains(&1)],
                    };
                    rank.reading = Some(Reading { attempt, forged, words, landed: [false; 2] });
                }
                Action::Audit if !bounds.corruption || bounds.fault == Fault::NoAudit => {
                    return self.happen(r, Event::Passed, bounds);
                }
                Action::Audit => {
                    let read_by = rank.load.as_ref().map(|load| load.follower.grant());
                    let read_by = read_by.map_or(Fingerprint([0; 16]), Grant::fingerprint);
                    self.sent.insert(Message::Ask { grant, rank: r as u8, attempt, read_by });
                }
                Action::Confirm if bounds.fault == Fault::NoConfirmation => {
                    return self.happen(r, Event::Held, bounds);
                }
                Action::Confirm => {
                    let read_by = rank.load.as_ref().map(|load| {
                        let mut grant = load.follower.grant().clone();
                        if bounds.fault == Fault::KeepsOldEpoch
                            && let Some(now) = self.leases.frontier(REQUEST)
                        {
                            // It knows of the new epoch, and has not read anew.
                            grant.epoch = now.grant.epoch;
                        }
                        grant.fingerprint()
                    });
                    let read_by = read_by.unwrap_or(Fingerprint([0; 16]));
                    let rank = r as u8;
                    self.sent.insert(Message::Confirm { grant, rank, attempt, read_by, swapped });
                }
                // What was never found cannot be given up.
                Action::Abandon if grant == 0 => {}
                Action::Abandon => {
                    self.sent.insert(Message::Abandon { grant });
                }
                Action::Report => {
                    let done = rank.load.as_ref().is_some_and(|l| l.life.stage() == &Stage::Done);
                    if done && rank.words != [grant; 2] {
                        let words = rank.words;
                        return Err(format!("D{r} uses {words:?} for grant {grant}"));
                    }
                    if done && swapped {
                        return Err(format!("D{r} uses grant {grant} for another prompt"));
                    }
                }
                Action::Cancel if bounds.fault == Fault::HandBackOnCancel => {
                    rank.kept_for = None;
                }
                Action::Cancel => {}
                Action::HandBack => (rank.kept_for, rank.load) = (None, None),
            }
        }
        Ok(())
    }

    /// Nothing is delivered any more, and time passes on both sides.
    fn drain(mut self, bounds: &Bounds) -> Result<(), String> {
        for r in 0..RANKS {
            self.happen(r, Event::Deadline, bounds)?;
            let last = match self.ranks[r].reading.take() {
                Some(reading) if reading.whole() => Event::Arrived,
                _ => Event::Settled,
            };
            self.happen(r, last, bounds)?;
            if self.ranks[r].kept_for.is_some() {
                return Err(format!("D{r} does not get its block back"));
            }
        }
        if self.computing.take().is_some() {
            // Its own life ends the request.
            self.leases.revoke(REQUEST, at(self.now));
            self.block = None;
        }
        for later in [5, 10] {
            if bounds.fault != Fault::NoExpiry {
                self.leases.expire(at(self.now + later));
            }
        }
        self.reuse();
        if self.block.is_some() || self.leases.open() > 0 || self.leases.remembered() > 0 {
            return Err("P does not get its block back".to_owned());
        }
        Ok(())
    }
}

/// What a rank begins with.
fn follower(bounds: &Bounds, forged: bool) -> Follower {
    let all = bounds.growth.is_none().then(|| tables(0, 2, forged));
    let to = if bounds.layers { 1 } else { 2 };
    let mut follower = Follower::of(all, Pace { from: 0, to, step: 1 });
    if bounds.layers {
        follower.by_layer(2);
    }
    follower
}

/// Walks all worlds; answers how many there are, or the shortest way to one where a promise is broken.
fn explore(bounds: &Bounds) -> Result<usize, Vec<String>> {
    // Worlds are told apart by 64 bits: among a million, two are mistaken for one once in 10⁷ runs.
    let mark = |world: &World| {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        hasher.finish()
    };
    let start = World::new();
    let mut known = HashSet::from([mark(&start)]);
    // How each world was reached: from which, and the number of the step that led there.
    let mut ways = vec![(0, 0)];
    let mut queue = VecDeque::from([(0, start)]);
    while let Some((at, world)) = queue.pop_front() {
        let problem = world.clone().drain(bounds).err();
        let next = world.next(bounds);
        let broken = next.iter().find_map(|(step, then)| {
            then.as_ref().err().map(|problem| format!("{step}: {problem}"))
        });
        if let Some(problem) = problem.or(broken) {
            return Err(retrace(&ways, at, bounds, problem));
        }
        for (step, (_, world)) in next.into_iter().enumerate() {
            let world = world.expect("the broken ones were sorted out");
            if known.insert(mark(&world)) {
                queue.push_back((ways.len(), world));
                ways.push((at, step));
            }
        }
    }
    Ok(ways.len())
}

/// The steps that led to a world, told from the start.
fn retrace(
    ways: &[(usize, usize)],
    mut at: usize,
    bounds: &Bounds,
    problem: String,
) -> Vec<String> {
    let mut steps = vec![];
    while at > 0 {
        steps.push(ways[at].1);
        at = ways[at].0;
    }
    let mut world = World::new();
    let mut told = vec![];
    for step in steps.into_iter().rev() {
        let (name, then) = world.next(bounds).swap_remove(step);
        told.push(name);
        world = then.expect("the way there was good");
    }
    told.push(problem);
    told
}

fn check(bounds: &Bounds) {
    match explore(bounds) {
        Ok(worlds) => println!("{worlds} worlds, no promise broken"),
        Err(way) => panic!("a promise is broken:\n{}", way.join("\n")),
    }
}

#[test]
fn two_ranks_one_lease() {
    check(&Bounds {
        grants: 1,
        attempts: [1, 1],
        ticks: 2,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn the_request_is_served_again() {
    check(&Bounds {
        grants: 2,
        attempts: [1, 1],
        ticks: 1,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn a_rank_starts_over() {
    check(&Bounds {
        grants: 1,
        attempts: [2, 1],
        ticks: 1,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn the_prefill_engine_restarts() {
    check(&Bounds {
        grants: 2,
        attempts: [1, 1],
        ticks: 0,
        restarts: 1,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn a_client_forges_tables() {
    check(&Bounds {
        grants: 1,
        attempts: [1, 1],
        ticks: 1,
        restarts: 0,
        forgery: true,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn a_client_sends_a_ticket_with_another_prompt() {
    for (attempts, growth, names) in [([1, 1], None, false), ([1, 0], Some(0), true)] {
        check(&Bounds {
            grants: 1,
            attempts,
            ticks: 1,
            restarts: 0,
            forgery: false,
            swaps: true,
            corruption: false,
            growth,
            layers: false,
            names,
            fault: Fault::None,
        });
    }
}

#[test]
fn ranks_follow_while_p_computes_and_starts_over() {
    check(&Bounds {
        grants: 1,
        attempts: [1, 1],
        ticks: 0,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: Some(1),
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn ranks_read_layer_by_layer_while_p_computes_and_starts_over() {
    check(&Bounds {
        grants: 1,
        attempts: [1, 0],
        ticks: 0,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: Some(1),
        layers: true,
        names: false,
        fault: Fault::None,
    });
}

#[test]
fn ranks_know_only_a_name_which_is_used_again() {
    for (grants, attempts, restarts) in [(1, [1, 1], 0), (2, [1, 0], 1)] {
        check(&Bounds {
            grants,
            attempts,
            ticks: 1,
            restarts,
            forgery: false,
            swaps: false,
            corruption: false,
            growth: Some(0),
            layers: false,
            names: true,
            fault: Fault::None,
        });
    }
}

#[test]
fn a_network_corrupts_what_it_carries() {
    check(&Bounds {
        grants: 1,
        attempts: [1, 1],
        ticks: 1,
        restarts: 0,
        forgery: false,
        swaps: false,
        corruption: true,
        growth: None,
        layers: false,
        names: false,
        fault: Fault::None,
    });
}

/// Without each of its safeguards the protocol breaks, and the check sees it.
#[test]
fn every_safeguard_is_needed() {
    for (fault, grants, attempts, ticks, restarts, forgery, growth) in [
        (Fault::NoConfirmation, 1, [1, 0], 1, 0, false, None),
        (Fault::CountByNumber, 1, [1, 1], 0, 0, false, None),
        (Fault::NoNonce, 2, [1, 0], 1, 0, false, None),
        (Fault::NoAttempt, 1, [2, 0], 1, 0, false, None),
        (Fault::HandBackOnCancel, 1, [1, 0], 0, 0, false, None),
        (Fault::NoExpiry, 1, [0, 0], 0, 0, false, None),
        (Fault::NoIncarnation, 2, [1, 0], 0, 1, false, None),
        (Fault::NoFingerprint, 1, [1, 0], 0, 0, true, None),
        (Fault::NoOrigin, 1, [1, 0], 0, 0, false, None),
        (Fault::NoEpoch, 1, [1, 0], 0, 0, false, Some(1)),
        (Fault::KeepsOldEpoch, 1, [1, 0], 0, 0, false, Some(1)),
        (Fault::ReadsOverLateWords, 1, [1, 0], 0, 0, false, Some(1)),
        (Fault::NoSeal, 1, [1, 0], 0, 0, false, Some(0)),
        (Fault::FollowsTheName, 2, [1, 0], 0, 0, false, Some(0)),
        (Fault::NoAudit, 1, [1, 0], 0, 0, false, None),
        (Fault::BelievesThePromise, 1, [1, 0], 0, 0, false, Some(0)),
        (Fault::SpeaksTooEarly, 1, [1, 0], 0, 0, false, Some(0)),
        (Fault::NoStep, 1, [1, 0], 0, 0, false, Some(1)),
    ] {
        let (corruption, names) = (fault == Fault::NoAudit, fault == Fault::FollowsTheName);
        let speaks = [Fault::BelievesThePromise, Fault::SpeaksTooEarly, Fault::NoStep];
        let also = [Fault::NoEpoch, Fault::KeepsOldEpoch];
        for layers in [false, true] {
            if !also.contains(&fault) && layers != speaks.contains(&fault) {
                continue;
            }
            let sound = Bounds {
                grants,
                attempts,
                ticks,
                restarts,
                forgery,
                swaps: fault == Fault::NoOrigin,
                corruption,
                growth,
                layers,
                names,
                fault: Fault::None,
            };
            assert!(explore(&sound).is_ok(), "{fault:?}: nothing is wrong while it is in place");
            match explore(&Bounds { fault, ..sound }) {
                Ok(worlds) => panic!("{fault:?}: nothing found in {worlds} worlds"),
                Err(way) => println!("{fault:?}:\n  {}", way.join("\n  ")),
            }
        }
    }
}
