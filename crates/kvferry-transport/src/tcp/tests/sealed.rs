//! What somebody on the path between two engines can do: whatever it changes, no byte of it is used.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Loops};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::frame::{Challenge, Hello};
use super::super::{Encrypt, Tcp, TcpOptions, parse};
use super::soon;
use crate::contract::{Error, InvalidFrame, Operation, Status, Transport};
use crate::memory::HostMemory;
use crate::shared::bytes::put_block;

/// Several pieces, and a rest.
const BYTES: usize = 300_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// What is done to the bytes of a connection, from one on that is counted from the end of the greeting.
#[derive(Clone, Debug)]
enum Act {
    Flip(u8),
    Drop(usize),
    Insert(Vec<u8>),
    /// So many bytes once more.
    Repeat(usize),
    /// So many bytes, and as many behind them, change places.
    Swap(usize),
    Cut,
}

#[derive(Clone, Debug)]
struct Attack {
    way: Way,
    at: usize,
    act: Act,
}

/// Someone who sees and changes all that goes between two engines.
struct OnPath {
    at: SocketAddr,
    seen: Arc<Mutex<Vec<u8>>>,
    /// Connections of which something was changed.
    changed: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<Arc<TcpStream>>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl OnPath {
    /// Before a server. An attack is carried out on the first connections, as many as are said.
    fn before(server: SocketAddr, attack: Option<Attack>, times: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut path = Self {
            at,
            seen: Arc::default(),
            changed: Arc::default(),
            ended: Arc::default(),
            streams: Arc::default(),
            thread: None,
        };
        path.thread = Some(std::thread::spawn({
            let (seen, changed) = (path.seen.clone(), path.changed.clone());
            let (ended, streams) = (path.ended.clone(), path.streams.clone());
            move || {
                std::thread::scope(|scope| {
                    for number in 0.. {
                        let (client, _) = listener.accept().unwrap();
                        if ended.load(Ordering::SeqCst) {
                            return;
                        }
                        let server = TcpStream::connect(server).unwrap();
                        let (client, server) = (Arc::new(client), Arc::new(server));
                        streams.lock().extend([client.clone(), server.clone()]);
                        for way in [Way::ToServer, Way::ToClient] {
                            let attack =
                                attack.clone().filter(|one| one.way == way && number < times);
                            let (from, to) = match way {
                                Way::ToServer => (client.clone(), server.clone()),
                                Way::ToClient => (server.clone(), client.clone()),
                            };
                            let (seen, changed) = (&*seen, &*changed);
                            scope.spawn(move || pass_on(way, &from, &to, attack, seen, changed));
                        }
                    }
                });
            }
        }));
        path
    }
}

impl Drop for OnPath {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.at);
        for stream in self.streams.lock().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let _ = self.thread.take().unwrap().join();
    }
}

fn pass_on(
    way: Way,
    mut from: &TcpStream,
    mut to: &TcpStream,
    attack: Option<Attack>,
    seen: &Mutex<Vec<u8>>,
    changed: &AtomicUsize,
) {
    let greeting = match way {
        Way::ToServer => Hello::BYTES + 32,
        Way::ToClient => Challenge::BYTES,
    };
    let (mut attack, mut passed, mut bytes) = (attack, 0, vec![0; 1 << 16]);
    let mut held = vec![];
    while let Ok(some @ 1..) = from.read(&mut bytes) {
        seen.lock().extend(&bytes[..some]);
        held.extend(&bytes[..some]);
        if let Some(Attack { at, act, .. }) = &attack {
            let first = greeting + at;
            let until = first
                + match act {
                    Act::Flip(_) | Act::Cut | Act::Insert(_) => 1,
                    Act::Drop(bytes) | Act::Repeat(bytes) => *bytes,
                    Act::Swap(bytes) => 2 * bytes,
                };
            // What it takes has to be here first; what is before it goes on, so that there are answers.
            if passed + held.len() < until {
                let free = first.saturating_sub(passed).min(held.len());
                if to.write_all(&held.drain(..free).collect::<Vec<_>>()).is_err() {
                    break;
                }
                passed += free;
                continue;
            }
            let first = first - passed;
            let until = until - passed;
            match act {
                Act::Flip(bit) => held[first] ^= 1 << bit,
                Act::Drop(_) => drop(held.drain(first..until)),
                Act::Insert(more) => drop(held.splice(first..first, more.iter().copied())),
                Act::Repeat(_) => held.extend_from_within(first..until),
                Act::Swap(bytes) => held[first..until].rotate_left(*bytes),
                Act::Cut => held.truncate(first),
            }
            changed.fetch_add(1, Ordering::SeqCst);
            let is_cut = matches!(act, Act::Cut);
            attack = None;
            if is_cut {
                let _ = to.write_all(&held);
                break;
            }
        }
        if to.write_all(&held).is_err() {
            break;
        }
        passed += held.len();
        held.clear();
    }
    // The end goes on, and so does what was held for what never came.
    let _ = to.write_all(&held);
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

struct End {
    transport: Tcp,
    memory: HostMemory,
}

impl End {
    fn new(encrypt: Encrypt, fill: impl Fn(usize) -> u8) -> Self {
        let memory = HostMemory::new(BYTES).unwrap();
        memory.write(0, &(0..BYTES).map(fill).collect::<Vec<_>>());
        let options = TcpOptions { encrypt, connections: 1, ..TcpOptions::default() };
        let end = Self { transport: Tcp::new(options).unwrap(), memory };
        // SAFETY: the transport is dropped before the memory, in the order of the fields; the
        // memory is only touched through its address.
        unsafe { end.transport.register(end.memory.region()) }.unwrap();
        end
    }
}

/// What a description says, but for the address.
fn with_address(description: &[u8], at: SocketAddr) -> Vec<u8> {
    let told = parse(description).unwrap().at.to_string();
    let before = 8 + 16 + 32;
    let mut other = description[..before].to_vec();
    put_block(&mut other, at.to_string().as_bytes());
    other.extend(&description[before + 4 + told.len()..]);
    assert_eq!(parse(&other).unwrap().at, at);
    other
}

/// Whatever is read twice differs.
fn byte(at: usize) -> u8 {
    (at ^ (at >> 8) ^ (at >> 16)) as u8 | 1
}

/// Two thirds of all bytes, in runs of 2,000; packed or not.
fn read(from: &End, to: &End, description: &[u8], packed: bool, patience: Duration) -> Status {
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    let runs = Loop { count: 100, source: 3000, destination: 3000 };
    let (start, to_start) = (from.memory.base(), to.memory.base());
    loops.add_nest((start, to_start), 2000, (0, 0), &[runs], table).unwrap();
    let peer = match to.transport.connect(description, soon()) {
        Ok(peer) => peer,
        Err(error) => return Status::Failed(error),
    };
    let until = Instant::now() + patience;
    let operation = match packed {
        true => to.transport.read_packed(&peer, &loops, until).unwrap(),
        false => to.transport.read(&peer, &loops, until).unwrap(),
    };
    operation.wait(until + Duration::from_secs(20))
}

/// What was read is right; where nothing may have been read, or not all, every other byte is as it was.
fn check(to: &End, whole: bool) {
    let wrong = to.memory.snapshot().into_iter().enumerate().find(|&(at, found)| {
        let right = if at % 3000 < 2000 { byte(at) } else { 0 };
        found != right && (whole || found != 0)
    });
    assert_eq!(wrong, None);
}

#[test]
fn what_is_encrypted_cannot_be_read_on_the_way() {
    for (encrypt, packed) in [
        (Encrypt::Never, false),
        (Encrypt::BetweenHosts, true),
        (Encrypt::Always, false),
        (Encrypt::Always, true),
    ] {
        let (from, to) = (End::new(Encrypt::Never, byte), End::new(encrypt, |_| 0));
        let description = from.transport.describe().unwrap();
        let path = OnPath::before(parse(&description).unwrap().at, None, 0);
        let description = with_address(&description, path.at);
        let status = read(&from, &to, &description, packed, Duration::from_secs(20));
        assert!(matches!(status, Status::Done(_)), "{status:?}");
        check(&to, true);
        let some: Vec<u8> = (6000..6064).map(byte).collect();
        let seen = path.seen.lock().windows(some.len()).any(|bytes| bytes == some);
        assert_eq!(seen, encrypt != Encrypt::Always, "{encrypt:?} {packed}");
        // No request is, whether content is or not.
        let address = from.memory.base().to_le_bytes();
        assert!(!path.seen.lock().windows(8).any(|bytes| bytes == address), "{encrypt:?}");
    }
}

/// Either end can ask for it.
#[test]
fn the_end_that_wants_it_encrypted_has_its_way() {
    for (ours, theirs) in [
        (Encrypt::Never, Encrypt::Always),
        (Encrypt::Always, Encrypt::Never),
        (Encrypt::Never, Encrypt::Never),
    ] {
        let (from, to) = (End::new(theirs, byte), End::new(ours, |_| 0));
        let peer = to.transport.connect(&from.transport.describe().unwrap(), soon()).unwrap();
        assert_eq!(peer.0.encrypts(), ours != theirs);
    }
    let elsewhere = "192.0.2.7".parse().unwrap();
    assert!(Encrypt::BetweenHosts.with(elsewhere) && !Encrypt::Never.with(elsewhere));
    for here in ["127.0.0.3", "::1", "::ffff:127.0.0.1"] {
        assert!(!Encrypt::BetweenHosts.with(here.parse().unwrap()), "{here}");
    }
}

/// Somebody who changes every connection wins nothing but that nothing arrives, and is named.
#[test]
fn a_bit_that_is_always_changed_ends_the_read_by_name() {
    for packed in [false, true] {
        let (from, to) = (End::new(Encrypt::Never, byte), End::new(Encrypt::Always, |_| 0));
        let description = from.transport.describe().unwrap();
        let attack = Attack { way: Way::ToClient, at: 100_000, act: Act::Flip(3) };
        let path = OnPath::before(parse(&description).unwrap().at, Some(attack), usize::MAX);
        let description = with_address(&description, path.at);
        let status = read(&from, &to, &description, packed, Duration::from_secs(20));
        assert_eq!(status, Status::Failed(Error::PeerMisbehaved(InvalidFrame::Changed)));
        // It was tried again.
        assert!(path.changed.load(Ordering::SeqCst) > 1);
        check(&to, false);
    }
}

fn acts() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0u8..8).prop_map(Act::Flip),
        (1usize..400).prop_map(Act::Drop),
        prop::collection::vec(any::<u8>(), 1..60).prop_map(Act::Insert),
        (1usize..400).prop_map(Act::Repeat),
        (1usize..200).prop_map(Act::Swap),
        Just(Act::Cut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever is changed on one connection, in either direction: all that is read is right, and is read in the end.
    #[test]
    fn what_is_changed_on_the_way_is_not_used(
        is_answer in any::<bool>(),
        at in prop_oneof![0usize..200, 0usize..200_000],
        act in acts(),
        packed in any::<bool>(),
        content in any::<bool>(),
    ) {
        let way = if is_answer { Way::ToClient } else { Way::ToServer };
        // Where content goes as it is, frames are protected nevertheless: the requests, and the first answer.
        let at = if content { at } else { at % 40 };
        prop_assume!(content || !is_answer || matches!(act, Act::Flip(_) | Act::Cut));
        let encrypt = if content { Encrypt::Always } else { Encrypt::Never };
        let (from, to) = (End::new(Encrypt::Never, byte), End::new(encrypt, |_| 0));
        let description = from.transport.describe().unwrap();
        let path = OnPath::before(parse(&description).unwrap().at, Some(Attack { way, at, act }), 1);
        let description = with_address(&description, path.at);
        let status = read(&from, &to, &description, packed, Duration::from_secs(1));
        let done = matches!(status, Status::Done(_));
        // A length that was changed, or bytes that were taken away, have the other end wait for what never comes.
        let waited = status == Status::Failed(Error::DeadlinePassed);
        prop_assert!(done || waited, "{:?}", status);
        check(&to, done);
    }
}
