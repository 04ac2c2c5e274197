//! The release before, which spoke protocol 1.2: what it said is played to today's agents byte for byte, once as D
//! and once as P. Fails when today's agents no longer understand it, or answer what it would not understand.
//! `../fixtures/README.md` says how it was written down.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use crate::common::{By, Engine, LONG, Recipe, blocks_for, eventually};
use kvferry_agent::{Ended, Failure, Loss, Outcome, Ticket, Trust, Version, ask_status};

const RECORD: &str = include_str!("../fixtures/protocol-1.2.txt");
/// How many tokens its requests had, by name.
const TOKENS: [(&str, u64); 3] = [("wanted", 22), ("unwanted", 2), ("lost", 2)];
/// Questions and answers of that version, by their numbers on the wire.
const FIT: u64 = 0;
const EXTEND: u64 = 1;
const ABANDON: u64 = 3;
const PING: u64 = 4;
const STATUS: u64 = 5;
const CONFIRM_READ: u64 = 6;
const CARDS: u64 = 0;
const DONE: u64 = 5;
const STATUS_REPLY: u64 = 6;

/// Today's P hears what a D of 1.2 said, and gives it the answers that it got then.
#[test]
fn a_decode_engine_of_the_release_before_is_served() {
    let p = Recipe::new("p", 1).by(By::Held).start();
    let record = Record::read();
    let mut connections = BTreeMap::new();
    let (mut names, mut asked) = (Names::default(), vec![]);
    for line in &record.lines {
        match line {
            Line::Ticket(then) => {
                let blocks = if then.request == "wanted" { blocks_for(22, 3) } else { vec![1] };
                names.learn(then, &p.grant(&then.request, &blocks, tokens(&then.request)));
            }
            Line::Revoked(request) => assert!(p.scheduler.revoke(request)),
            Line::Connects(number, prologue) => {
                let mut stream = TcpStream::connect(p.scheduler.address()).unwrap();
                stream.set_read_timeout(Some(LONG)).unwrap();
                stream.write_all(prologue).unwrap();
                connections.insert(number, (stream, false));
            }
            Line::Asked(number, message) => {
                let (stream, greeted) = connections.get_mut(number).unwrap();
                if !std::mem::replace(greeted, true) {
                    send(stream, message);
                    let welcome = receive(stream).expect("a welcome");
                    assert!(welcome.len() > 4, "{welcome:?}");
                    continue;
                }
                send(stream, &names.today(message));
                let answer = receive(stream).expect("an answer");
                let question = Message::read(message);
                let (now, then) = (Message::read(&answer), record.answer(*number, question.number));
                assert_eq!((now.number, now.kind), (question.number, then.kind), "to {question:?}");
                // Addresses, and what an operator sees, are others each time.
                if now.kind != CARDS && now.kind != STATUS_REPLY {
                    assert_eq!(now.rest, then.rest, "to {question:?}");
                }
                asked.push(question.kind);
            }
            Line::Answered(..) => {}
        }
    }
    for kind in [FIT, EXTEND, ABANDON, STATUS, CONFIRM_READ] {
        assert!(asked.contains(&kind), "{kind} was not asked: {asked:?}");
    }
    let released = p.scheduler.wait_released(Instant::now() + LONG);
    let mut why: Vec<_> = released.iter().map(|one| (&*one.request, one.why)).collect();
    why.sort_by_key(|(request, _)| *request);
    let all =
        [("lost", Ended::Revoked), ("unwanted", Ended::Abandoned), ("wanted", Ended::Confirmed)];
    assert_eq!(why, all);
    assert_eq!(p.counter("confirmations_not_granted"), 1);
    assert_eq!(p.counter("refusals"), 1);
}

/// Today's D hears what a P of 1.2 answered, and says what a D of 1.2 said.
#[test]
fn a_prefill_engine_of_the_release_before_is_read() {
    let record = Arc::new(Record::read());
    let player = Player::start(record.clone());
    let ticket = |name| record.ticket(name, &player.address);
    let d = Recipe::new("d", 1).by(By::Held).start();

    let wanted = ticket("wanted");
    d.scheduler.hold(&wanted, LONG);
    eventually("an extension", || player.heard().iter().any(|said| said.0 == EXTEND));
    assert_eq!(read(&d, &wanted, &blocks_for(22, 3)), Outcome::Done);
    d.scheduler.settle(&wanted);
    d.scheduler.abandon(&ticket("unwanted"));
    assert_eq!(read(&d, &ticket("lost"), &[2]), Outcome::Expired(Loss::NotGranted));
    let revoked = Outcome::Expired(Loss::Ended(Ended::Revoked));
    assert_eq!(read(&d, &ticket("lost"), &[1]), revoked);

    let mut misfit = Recipe::new("misfit", 1).by(By::Held);
    misfit.model = "another";
    let misfit = misfit.start();
    misfit.start_load("lost", &ticket("lost"), &[1], &[1], 2, LONG);
    let Outcome::Failed(Failure::Refused(reason)) = &misfit.wait_ends("lost")[0] else {
        panic!("not refused")
    };
    assert!(reason.contains("another"), "{reason}");

    let status = ask_status(&player.address, &Trust::Loopback, LONG).unwrap();
    assert_eq!((&*status.engine, &*status.protocol, status.ranks), ("p", "1.2", 1));

    // Nothing that it would not know, and word for word what it said itself.
    let same = [EXTEND, ABANDON, CONFIRM_READ];
    let then = record.lines.iter().filter_map(Line::question).map(|message| message.lasting());
    for said in then.filter(|(kind, _)| same.contains(kind)) {
        eventually(&format!("{said:?} is said"), || player.heard().contains(&said));
    }
    assert_eq!(*player.unknown.lock().unwrap(), [] as [u64; 0]);
}

/// The record is of the release before, not of an older one: see `../fixtures/README.md`.
#[test]
fn the_record_is_of_the_minor_version_before() {
    let record = Record::read();
    let hello = record.lines.iter().find_map(|line| match line {
        Line::Asked(_, message) => Some(message),
        _ => None,
    });
    let Version { major, minor } = Version::CURRENT;
    let before = [major.to_le_bytes(), (minor - 1).to_le_bytes()].concat();
    assert_eq!(hello.unwrap()[..4], before);
}

fn tokens(request: &str) -> u64 {
    TOKENS.iter().find(|(name, _)| *name == request).unwrap().1
}

fn read(d: &Engine, ticket: &Ticket, source: &[u32]) -> Outcome {
    let tokens = tokens(&ticket.request);
    d.start_load(&ticket.request, ticket, source, &blocks_for(tokens, 9), tokens, LONG);
    d.ranks[0].held.as_ref().unwrap().next().finish();
    d.wait_ends(&ticket.request).remove(0)
}

struct Record {
    lines: Vec<Line>,
}

enum Line {
    Ticket(Ticket),
    Revoked(String),
    Connects(usize, Vec<u8>),
    Asked(usize, Vec<u8>),
    Answered(usize, Vec<u8>),
}

impl Record {
    fn read() -> Self {
        let lines = RECORD.lines().map(|line| {
            let (first, rest) = line.split_once(' ').unwrap();
            match (first, rest.split_once(' ')) {
                ("ticket", _) => Line::Ticket(serde_json::from_str(rest).unwrap()),
                ("revoked", _) => Line::Revoked(rest.to_owned()),
                (number, Some((what, hex))) => {
                    let number = number.parse().unwrap();
                    match what {
                        "connects" => Line::Connects(number, bytes(hex)),
                        ">" => Line::Asked(number, bytes(hex)),
                        "<" => Line::Answered(number, bytes(hex)),
                        _ => panic!("{line}"),
                    }
                }
                _ => panic!("{line}"),
            }
        });
        Self { lines: lines.collect() }
    }

    /// What was handed to the router, but for the address.
    fn ticket(&self, name: &str, address: &str) -> Ticket {
        let found = self.lines.iter().find_map(|line| match line {
            Line::Ticket(ticket) if ticket.request == name => Some(ticket.clone()),
            _ => None,
        });
        Ticket { address: address.to_owned(), ..found.unwrap() }
    }

    /// What was said on a connection, one way, beginning with the hello or welcome.
    fn said(&self, connection: usize, by_p: bool) -> Vec<&[u8]> {
        let lines = self.lines.iter().filter_map(|line| match line {
            Line::Asked(number, said) if *number == connection && !by_p => Some(&**said),
            Line::Answered(number, said) if *number == connection && by_p => Some(&**said),
            _ => None,
        });
        lines.collect()
    }

    /// The answer to the question of this number.
    fn answer(&self, connection: usize, number: u64) -> Message<'_> {
        let answers = self.said(connection, true).into_iter().skip(1).map(Message::read);
        answers.into_iter().find(|answer| answer.number == number).expect("an answer")
    }
}

impl Line {
    /// A question; hellos are none.
    fn question(&self) -> Option<Message<'_>> {
        match self {
            // The first four bytes of a hello are its version.
            Self::Asked(_, said) if !said.starts_with(&[1, 0, 2, 0]) => Some(Message::read(said)),
            _ => None,
        }
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A question's kind, and what of it is the same each time.
type Lasting = (u64, Vec<u8>);

/// A question or an answer: its number, its kind, and all after that.
#[derive(Clone, Copy, Debug)]
struct Message<'a> {
    number: u64,
    kind: u64,
    rest: &'a [u8],
}

impl<'a> Message<'a> {
    fn read(message: &'a [u8]) -> Self {
        let (number, rest) = read_varint(message);
        let (kind, rest) = read_varint(rest);
        Self { number, kind, rest }
    }

    /// A question's kind, and all of it that is not drawn anew each time: not a confirmation's attempt, which is
    /// the last thing before the fingerprint.
    fn lasting(&self) -> Lasting {
        if self.kind != CONFIRM_READ {
            return (self.kind, self.rest.to_vec());
        }
        let (before, fingerprint) = self.rest.split_at(self.rest.len() - 16);
        // The life, the request and its lease, the engine, its rank and how many it has.
        let attempt = skip(skip(skip_text(skip(skip_text(skip(before))))));
        let before = &before[..before.len() - attempt.len()];
        (self.kind, [before, fingerprint].concat())
    }
}

/// Numbers as they are on the wire: seven bits in each byte, the lowest first.
fn varint(mut number: u64) -> Vec<u8> {
    let mut made = vec![];
    while number >= 0x80 {
        made.push(number as u8 | 0x80);
        number >>= 7;
    }
    made.push(number as u8);
    made
}

fn read_varint(bytes: &[u8]) -> (u64, &[u8]) {
    let length = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let digits = bytes[..length].iter().enumerate();
    let number = digits.map(|(at, byte)| u64::from(byte & 0x7f) << (7 * at)).sum();
    (number, &bytes[length..])
}

fn skip(bytes: &[u8]) -> &[u8] {
    read_varint(bytes).1
}

fn skip_text(bytes: &[u8]) -> &[u8] {
    let (length, rest) = read_varint(bytes);
    &rest[length as usize..]
}

/// Lives and leases have other names today than they had then. Both are 64 random bits.
#[derive(Default)]
struct Names(Vec<[u64; 2]>);

impl Names {
    fn learn(&mut self, then: &Ticket, now: &Ticket) {
        self.0.push([then.incarnation.0, now.incarnation.0]);
        self.0.push([then.nonce, now.nonce]);
    }

    /// A message of then, with the names of today.
    fn today(&self, message: &[u8]) -> Vec<u8> {
        let mut made = message.to_vec();
        for [then, now] in self.0.iter().map(|pair| pair.map(varint)) {
            if let Some(at) = made.windows(then.len()).position(|part| part == then) {
                made.splice(at..at + then.len(), now);
            }
        }
        made
    }
}

fn send(stream: &mut TcpStream, message: &[u8]) {
    let framed = [&(message.len() as u32).to_le_bytes(), message].concat();
    stream.write_all(&framed).unwrap();
}

fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}

/// P of the release before: answers as in the record, and knows nothing else.
struct Player {
    address: String,
    heard: Arc<Mutex<Vec<Lasting>>>,
    /// Kinds of questions that it does not know.
    unknown: Arc<Mutex<Vec<u64>>>,
}

impl Player {
    fn start(record: Arc<Record>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let player = Self { address, heard: Arc::default(), unknown: Arc::default() };
        let (heard, unknown) = (player.heard.clone(), player.unknown.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (record, heard, unknown) = (record.clone(), heard.clone(), unknown.clone());
                thread::spawn(move || answer(stream.unwrap(), &record, &heard, &unknown));
            }
        });
        player
    }

    /// What it was asked, as far as it lasts.
    fn heard(&self) -> Vec<Lasting> {
        self.heard.lock().unwrap().clone()
    }
}

fn answer(
    mut stream: TcpStream,
    record: &Record,
    heard: &Mutex<Vec<Lasting>>,
    unknown: &Mutex<Vec<u64>>,
) {
    let mut prologue = [0; 9];
    stream.read_exact(&mut prologue).unwrap();
    let Some(hello) = receive(&mut stream) else { return };
    // The connection of whoever said the same of itself then.
    let same = record.lines.iter().find_map(|line| match line {
        Line::Connects(number, then) if *then == prologue => {
            let said = record.said(*number, false);
            (said[0][4..] == hello[4..]).then_some(*number)
        }
        _ => None,
    });
    let connection = same.unwrap_or_else(|| panic!("nobody said {hello:?}"));
    let (asked, answered) = (record.said(connection, false), record.said(connection, true));
    send(&mut stream, answered[0]);
    while let Some(question) = receive(&mut stream) {
        let question = Message::read(&question);
        if question.kind == PING {
            send(&mut stream, &[varint(question.number), varint(DONE)].concat());
            continue;
        }
        heard.lock().unwrap().push(question.lasting());
        // The same question, or one of its kind.
        let known = asked[1..].iter().map(|said| Message::read(said));
        let alike = known.filter(|then| then.kind == question.kind);
        let Some(then) = alike.max_by_key(|then| then.lasting() == question.lasting()) else {
            // It closes the connection on what it does not know.
            unknown.lock().unwrap().push(question.kind);
            return;
        };
        let then = record.answer(connection, then.number);
        send(
            &mut stream,
            &[varint(question.number), varint(then.kind), then.rest.to_vec()].concat(),
        );
    }
}
