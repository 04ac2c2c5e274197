//! Somebody does wrong at the port where peers shake hands, or has this side connect to where no peer is. Attackers go at
//! a rate that leaves the machine idle, and ports are as much smaller than a real one as they are slower.

mod common;

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::log::Log;
use common::*;
use kvferry_agent::{Failure, Key, Limits, Network, Outcome, Trust, Version, ask_status};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;

const HERE: [u8; 4] = [127, 0, 0, 1];
const ELSEWHERE: [u8; 4] = [127, 0, 0, 2];
/// Connections a second.
const RATE: u64 = 200;
/// What a port is made for.
const FULL_RATE: u64 = 5000;

fn key() -> Trust {
    Trust::Key(Key::new(b"the secret of these tests").unwrap())
}

/// What attackers say.
#[derive(Clone, Copy)]
enum Says {
    /// Nothing, one byte, another key's proof or garbage; one after the other.
    Anything,
    /// It is let in, asks again and again, and never reads.
    Questions,
}

impl Says {
    fn bytes(self, number: usize) -> Vec<u8> {
        match (self, number % 4) {
            (Self::Anything, 0) => vec![],
            (Self::Anything, 1) => b"k".to_vec(),
            (Self::Anything, 2) => [&b"kvferry\x01\x01\x30\x00"[..], &[7; 48]].concat(),
            (Self::Anything, _) => vec![0xee; 100],
            (Self::Questions, _) => {
                let Version { major, minor } = Version::CURRENT;
                let version = [major.to_le_bytes(), minor.to_le_bytes()].concat();
                let hello = [b"kvferry\x01\x00\x06\x00\x00\x00", &*version, b"\x01x"].concat();
                // Its number, and what it is doing.
                let status = [2, 0, 0, 0, 1, 5];
                [hello, status.repeat(3000)].concat()
            }
        }
    }
}

/// Connections that are opened one after the other, and kept as long as the other side keeps them.
struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(to: &str, from: [u8; 4], says: Says, rate: u64) -> Self {
        let to: SocketAddr = to.parse().unwrap();
        let stop: Arc<AtomicBool> = Arc::default();
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let mut kept = VecDeque::new();
                let mut clock = tokio::time::interval(Duration::from_secs(1) / rate as u32);
                for number in 0.. {
                    clock.tick().await;
                    if stopped.load(SeqCst) {
                        break;
                    }
                    let socket = TcpSocket::new_v4().unwrap();
                    socket.set_recv_buffer_size(4096).unwrap();
                    socket.bind((from, 0).into()).unwrap();
                    let Ok(mut stream) = socket.connect(to).await else { continue };
                    let bytes = says.bytes(number);
                    // What it does not take at once it need not take.
                    let said = stream.write_all(&bytes);
                    _ = tokio::time::timeout(Duration::from_millis(1), said).await;
                    kept.push_back(stream);
                    if kept.len() > 500 {
                        // Guests stay for as long as they are let.
                        match says {
                            Says::Anything => kept.pop_front(),
                            Says::Questions => kept.pop_back(),
                        };
                    }
                }
            });
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// One that P has known before, and others that it has not, load what they want.
fn all_load(p: &Engine, known: &Engine, address: &str, trust: &Trust) {
    for round in 0..3 {
        let new = Recipe::new("new", 1).trust(trust.clone()).start();
        for (name, d) in [("known", known), ("new", &new)] {
            let request = format!("{name} {round}");
            assert_eq!(p.hand_over(d, &request, 5, address), [Outcome::Done], "{request}");
        }
    }
}

/// The way to it takes 50 ms, in each direction.
fn besieged(from: [u8; 4], places: usize) {
    let mut p = Recipe::new("p", 1).trust(key());
    p.scheduler.limits.strangers = places;
    let p = p.start();
    let known = Recipe::new("known", 1).trust(key()).start();
    let wire = Wire::to(p.scheduler.address());
    wire.delay(Duration::from_millis(50));
    assert_eq!(p.hand_over(&known, "before", 5, &wire.address), [Outcome::Done]);
    let flood = Flood::start(p.scheduler.address(), from, Says::Anything, RATE);
    eventually("all places are taken", || p.counter("connections_turned_away") > 2 * places as u64);
    all_load(&p, &known, &wire.address, &key());
    drop(flood);
}

#[test]
fn strangers_from_elsewhere_keep_nobody_out() {
    // Each is dropped after 40 ms.
    besieged(ELSEWHERE, 8);
}

#[test]
fn strangers_from_the_same_address_keep_nobody_out() {
    besieged(HERE, Limits::default().strangers * RATE as usize / FULL_RATE as usize);
}

/// As a port that drops it among many others.
#[test]
fn a_connection_that_ends_without_an_answer_is_tried_again() {
    for trust in [key(), Trust::Loopback] {
        let p = Recipe::new("p", 1).trust(trust.clone()).start();
        let d = Recipe::new("d", 1).trust(trust).start();
        let wire = Wire::to(p.scheduler.address());
        wire.drop_next(5);
        assert_eq!(p.hand_over(&d, "r", 5, &wire.address), [Outcome::Done]);
        assert_eq!(wire.clients_to_drop(), 0);
    }
}

/// They are let in, ask, and do not read. Nobody would hurry them for as long as this takes.
#[test]
fn guests_that_never_read_keep_nobody_out() {
    for from in [HERE, ELSEWHERE] {
        let mut p = Recipe::new("p", 1);
        p.scheduler.limits.connections = 16;
        p.scheduler.limits.answer = LONG * 2;
        let p = p.start();
        let known = Recipe::new("known", 1).start();
        let address = p.scheduler.address().to_owned();
        assert_eq!(p.hand_over(&known, "before", 5, &address), [Outcome::Done]);
        let flood = Flood::start(&address, from, Says::Questions, 40);
        eventually("all places are taken", || p.counter("connections") > 20);
        all_load(&p, &known, &address, &Trust::Loopback);
        assert!(p.scheduler.status().peers.len() <= 16);
        drop(flood);
    }
}

/// A question of six bytes.
#[test]
fn whoever_asks_is_told_the_first_of_each_list() {
    let p = Recipe::new("p", 1).start();
    for number in 0..200 {
        p.grant(&format!("r{number}"), &[1], 1);
    }
    let status = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap();
    assert_eq!((status.leases.len(), status.left_out.leases), (64, 136));
    assert_eq!((status.peers.len(), status.left_out.peers), (1, 0));
    // The engine itself knows all.
    assert_eq!(p.scheduler.status().leases.len(), 200);
}

fn networks(texts: &[&str]) -> Vec<Network> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// How a load ends whose ticket names this address.
fn refusal(p: &Engine, d: &Engine, address: &str) -> String {
    let mut ticket = p.grant("r", &[1], 1);
    address.clone_into(&mut ticket.address);
    d.start_load("r", &ticket, &[1], &[1], 1, LONG);
    p.scheduler.revoke("r");
    match d.wait_ends("r").remove(0) {
        Outcome::Failed(Failure::Refused(why)) => why,
        other => panic!("{address}: {other:?}"),
    }
}

/// Packets to these addresses would get no answer: only who sends none can tell so much.
#[test]
fn a_ticket_leads_nowhere_else() {
    let p = Recipe::new("p", 1).start();
    let without_key = Recipe::new("d", 1).start();
    for address in
        ["192.0.2.1:7000", "169.254.169.254:80", "[::ffff:192.0.2.1]:7000", "0.0.0.0:7000"]
    {
        let why = refusal(&p, &without_key, address);
        assert!(why.contains(" is not connected to: "), "{address}: {why}");
    }
    let why = refusal(&p, &without_key, "192.0.2.1:7000");
    assert!(why.contains("192.0.2.1:7000") && why.contains("loopback"), "{why}");
    for trust in [key(), Trust::Insecure] {
        let d = Recipe::new("d", 1).trust(trust).start();
        for address in ["169.254.169.254:80", "[fe80::1]:80", "224.0.0.1:80"] {
            let why = refusal(&p, &d, address);
            assert!(why.contains("never link-local"), "{address}: {why}");
        }
    }
}

#[test]
fn only_networks_that_the_operator_names_are_connected_to() {
    let p = Recipe::new("p", 1).start();
    let elsewhere = TcpListener::bind((IpAddr::from(ELSEWHERE), 0)).unwrap();
    let address = elsewhere.local_addr().unwrap().to_string();
    for trust in [Trust::Loopback, Trust::Insecure, key()] {
        let mut d = Recipe::new("d", 1).trust(trust);
        d.worker.peers = networks(&["127.0.0.1", "10.0.0.0/8"]);
        d.scheduler.peers = d.worker.peers.clone();
        let d = d.start();
        let why = refusal(&p, &d, &address);
        assert!(why.contains(&address) && why.contains("127.0.0.1/32, 10.0.0.0/8"), "{why}");
        // D's scheduler keeps the lease alive meanwhile.
        let mut ticket = p.grant("held", &[1], 1);
        (ticket.address, ticket.term_ms) = (address.clone(), 200);
        d.scheduler.hold(&ticket, LONG);
        eventually("the lease is lost", || !d.scheduler.lost().is_empty());
        p.scheduler.revoke("held");
    }
    elsewhere.set_nonblocking(true).unwrap();
    assert_eq!(elsewhere.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "nobody came");
}

/// An engine where it may be, with memory where it may not.
#[test]
fn memory_is_read_where_engines_may_be() {
    let mut p = Recipe::new("p", 1);
    p.tcp.bind = (ELSEWHERE, 0).into();
    let p = p.start();
    let d = |peers: &[&str]| {
        let mut d = Recipe::new("d", 1);
        d.worker.peers = networks(peers);
        d.start()
    };
    let address = p.scheduler.address().to_owned();
    let why = refusal(&p, &d(&["127.0.0.1"]), &address);
    assert!(why.starts_with("rank 0 is read elsewhere: 127.0.0.2:"), "{why}");
    assert_eq!(p.hand_over(&d(&["127.0.0.0/30"]), "good", 5, &address), [Outcome::Done]);
    assert_eq!(p.hand_over(&d(&[]), "any", 5, &address), [Outcome::Done]);
}

#[test]
fn who_is_turned_away_all_the_time_is_mentioned_once() {
    let log = Log::start();
    let p = Recipe::new("p", 1).trust(key()).start();
    let from = [127, 0, 0, 3];
    let flood = Flood::start(p.scheduler.address(), from, Says::Anything, RATE);
    eventually("many are turned away", || p.counter("connections_turned_away") > 50);
    drop(flood);
    assert_eq!(log.lines("turned a connection away from=127.0.0.3:"), 1);

    // The same, on the other side: an address that nobody can be reached at, in request after request.
    let nobody = quiet_address().to_string();
    let mut d = Recipe::new("d", 1);
    d.worker.handshake = Duration::from_millis(100);
    let d = d.start();
    for number in 0..3 {
        let request = format!("r{number}");
        let outcome = p.hand_over(&d, &request, 5, &nobody).remove(0);
        assert!(matches!(outcome, Outcome::Failed(Failure::PeerGone(_))), "{outcome:?}");
    }
    assert_eq!(log.lines(&format!("cannot connect address=\"{nobody}\"")), 1);
}
