//! Fuzz bodies for what strangers reach first: whatever the bytes, nothing may panic, nothing may be
//! half right, and memory stays in proportion. The same bodies run in a normal test, on random and on
//! mutated bytes. Not in what is shipped.

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_digest::{Digest, Part};
use kvferry_layout::{Phase, StateBox};
use kvferry_plan::BlockTable;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::rules::grant::{Claim, Fingerprint, Grant, InFlight, Origin};
use crate::rules::lease::{Answer, Consumer, Ended, Frontier, LeaseKey, Loss};
use crate::wire::listener::{Host, Listener};
use crate::wire::message::{
    Card, Hello, Left, Question, Reply, Welcome, decode, decode_opening, encode, encode_opening,
};
use crate::wire::news::{Known, News, Sought};
use crate::wire::places::Limits;
use crate::wire::task::{Task, TaskReply, Token};
use crate::wire::ticket::Incarnation;
use crate::wire::trust::{Key, Trust};
use crate::wire::version::Version;

/// Decodes each kind of message. What decodes must encode, and decode to the same again. Answers how
/// many kinds the bytes were taken for.
pub fn decode_message(bytes: &[u8]) -> usize {
    fn whole<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(bytes: &[u8]) -> bool {
        let Ok(value) = decode::<T>(bytes) else { return false };
        // Numbers have more than one encoding; what they stand for is the same.
        assert_eq!(decode::<T>(&encode(&value)).as_ref(), Ok(&value));
        true
    }
    fn opening<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(bytes: &[u8]) -> bool {
        let ours = Version::CURRENT;
        let Ok((theirs, value)) = decode_opening::<T>(ours, bytes) else { return false };
        let again = decode_opening::<T>(ours, &encode_opening(theirs, &value));
        assert_eq!(again.as_ref(), Ok(&(theirs, value)));
        true
    }
    let taken = [
        opening::<Hello>(bytes),
        opening::<Welcome>(bytes),
        whole::<(u32, Question)>(bytes),
        whole::<(u32, Reply)>(bytes),
        whole::<Card>(bytes),
    ];
    taken.into_iter().filter(|taken| *taken).count()
}

/// Plays the bytes as one whole connection to an agent that has no key, and to one that has. Answers
/// whether the first one let it in, and how many questions it answered.
pub fn connect(bytes: &[u8]) -> (bool, u64) {
    let key = Key::new(b"a key that no fuzzer knows").expect("it is long enough");
    assert_eq!(visit(bytes, Trust::Key(key)), (false, 0), "let in without the key");
    visit(bytes, Trust::Loopback)
}

fn visit(bytes: &[u8], trust: Trust) -> (bool, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime without sockets can be made");
    let listener = Listener::new(trust, Version::CURRENT, Limits::default());
    let host = Arc::new(Counting::default());
    let stream = tokio::io::join(Cursor::new(bytes.to_vec()), tokio::io::sink());
    let inside = runtime.block_on(listener.visit(stream, &host));
    assert!(listener.guests().is_empty(), "whoever has left is not inside");
    (inside, host.0.load(Ordering::Relaxed))
}

/// Answers with what was asked for, as far as there is any.
#[derive(Default)]
struct Counting(AtomicU64);

impl Host for Counting {
    fn welcome(&self) -> Welcome {
        Welcome { engine: "p".to_owned(), incarnation: Incarnation(1), term_ms: 1000 }
    }

    async fn answer(&self, _: &str, question: Question) -> Reply {
        self.0.fetch_add(1, Ordering::Relaxed);
        match question {
            Question::Extend { keys, .. } => {
                Reply::Leases(keys.iter().map(|_| Answer::NotHeld(Loss::Unknown)).collect())
            }
            Question::Confirm { claim, .. } => {
                let wanted = claim.origin;
                Reply::Lease(Answer::NotHeld(Loss::OtherOrigin { granted: None, wanted }))
            }
            Question::Fit { .. } => Reply::NotReady,
            Question::Written { step, known, .. } => {
                let states = vec![format!("layers.{known}/k")];
                Reply::Task(TaskReply::Written { states, over: step > 3 })
            }
            Question::Ask { .. } | Question::Do { .. } => {
                Reply::Task(TaskReply::NotHeld(Loss::NotGranted))
            }
            Question::Abandon { .. } | Question::Ping | Question::Status => Reply::Done,
            Question::Drain { .. } => Reply::Left(Left { leases: 1, holds: 0 }),
            Question::Follow { known, .. } => Reply::Frontier(news(&known)),
        }
    }
}

/// How far a lease has come, told to someone who knows this much.
fn news(known: &Known) -> News {
    let key = LeaseKey { request: "a".to_owned(), nonce: 1 << 40 };
    let table = BlockTable { first: 2, blocks: (0..40).collect() };
    let grant = Grant { epoch: 1, tokens: 600, tables: vec![table.clone(), table] };
    let in_flight = [InFlight { step: 4, tokens: 640 }];
    let sealed = known.epoch > 1;
    let (nonce, enclosed) = (key.nonce, &[7; 5]);
    let frontier = Frontier { nonce, grant: &grant, in_flight: &in_flight, enclosed, sealed };
    let news = News::of(Incarnation(7), key, &frontier, known);
    // Whatever it says that it knows, what it is told goes on from there or is refused.
    let before = known
        .blocks
        .iter()
        .flatten()
        .map(|blocks| BlockTable { first: 2, blocks: (0..*blocks % 50).collect() });
    let before = Grant { epoch: known.epoch, tokens: known.tokens, tables: before.collect() };
    if let Some(after) = news.clone().after(&before) {
        assert_eq!(after.epoch, grant.epoch);
    }
    news
}

/// Good messages to start mutating from.
pub fn messages() -> Vec<Vec<u8>> {
    let card = Card {
        rank: 3,
        manifest: vec![1; 40],
        transport: "tcp".to_owned(),
        description: vec![2; 20],
        service: None,
    };
    let incarnation = Incarnation(7);
    let replies = [
        Reply::Cards { incarnation, cards: vec![card.clone(), card.clone()] },
        Reply::Refused("it does not fit".to_owned()),
        Reply::NotReady,
        Reply::Leases(vec![Answer::Held, Answer::NotHeld(Loss::Restarted)]),
        Reply::Lease(Answer::NotHeld(Loss::Ended(Ended::Expired))),
        Reply::Lease(Answer::NotHeld(Loss::OtherOrigin {
            granted: Some(Origin([1; 16])),
            wanted: None,
        })),
        Reply::Done,
        Reply::Status("{}".to_owned()),
        Reply::Frontier(news(&Known::default())),
        Reply::Frontier(news(&Known { blocks: Some(vec![3, 0]), ..Known::default() })),
        Reply::Task(TaskReply::Digests(vec![Digest([1, 2]), Digest([3, 4])])),
        Reply::Task(TaskReply::Written { states: vec!["layers.0/k".to_owned()], over: false }),
        Reply::Task(TaskReply::Unable("no means".to_owned())),
        Reply::Left(Left { leases: 3, holds: 1 }),
    ];
    let welcome = Counting::default().welcome();
    let hello = Hello { who: "d/0 (tp0)".to_owned() };
    let mut all = vec![
        encode(&card),
        encode_opening(Version::CURRENT, &hello),
        encode_opening(Version { major: 1, minor: Version::CURRENT.minor + 1 }, &welcome),
    ];
    all.extend(replies.map(|reply| encode(&(8_u32, reply))));
    all.extend(questions().map(|question| encode(&(9_u32, question))));
    all
}

/// Good connections to start mutating from, without and with a key.
pub fn connections() -> Vec<Vec<u8>> {
    let open = |mode: u8| [&b"kvferry\x01"[..], &[mode]].concat();
    let framed = |message: Vec<u8>| [&(message.len() as u32).to_le_bytes()[..], &message].concat();
    let hello = encode_opening(Version::CURRENT, &Hello { who: "d/0 (tp0)".to_owned() });
    let mut talk = [open(0), framed(hello)].concat();
    let mut all = vec![talk.clone()];
    for (number, question) in questions().into_iter().enumerate() {
        talk.extend(framed(encode(&(number as u32, question))));
        all.push(talk.clone());
    }
    // The first message of a key's proof: an ephemeral key and a tag, which prove nothing.
    let proof = [&48_u16.to_le_bytes()[..], &[5; 48]].concat();
    all.push([open(1), proof].concat());
    all.push([open(2), vec![0x16, 3, 1, 0, 5, 1, 0, 0, 1, 0]].concat());
    all
}

fn questions() -> [Question; 12] {
    let key = |request: &str| LeaseKey { request: request.to_owned(), nonce: 1 << 40 };
    let incarnation = Incarnation(7);
    let consumer = Consumer { engine: "decode".to_owned(), rank: 1, ranks: 2, attempt: 9 };
    let part = Part {
        state: "layers.0/k".to_owned(),
        bounds: StateBox::new([0..4, 0..64]),
        phase: Phase::ALL,
        entries: (0..20).into(),
    };
    let task = Task::Digest { key: kvferry_digest::Key([1, 2]), parts: vec![part] };
    let tables = vec![BlockTable { first: 0, blocks: vec![3, 4] }];
    let grant = Grant { epoch: 0, tokens: 20, tables };
    [
        Question::Fit { manifest: vec![1; 30], transport: "local".to_owned() },
        Question::Extend { incarnation, keys: vec![key("a"), key("b")] },
        Question::Confirm {
            incarnation,
            key: key("a"),
            consumer,
            claim: Claim { read_by: Fingerprint([7; 16]), origin: Some(Origin([8; 16])) },
        },
        Question::Ask {
            incarnation,
            key: key("a"),
            read_by: Fingerprint([7; 16]),
            rank: 2,
            patience_ms: 1000,
            task: task.clone(),
        },
        Question::Do { token: Token([9; 16]), grant, patience_ms: 1000, task },
        Question::Abandon { incarnation, keys: vec![key("c")] },
        Question::Ping,
        Question::Status,
        Question::Drain { on: true },
        Question::Follow { sought: Sought::Name("cmpl-1".to_owned()), known: Known::default() },
        Question::Follow {
            sought: Sought::Lease { incarnation, key: key("a") },
            known: Known {
                nonce: Some(1 << 40),
                epoch: 1,
                tokens: 64,
                blocks: Some(vec![4, 1]),
                step: 3,
            },
        },
        Question::Written { incarnation, key: key("a"), rank: 1, step: 4, known: 2 },
    ]
}
