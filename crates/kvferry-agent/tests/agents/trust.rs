//! Who is let in, and what the others learn: nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::certificates::certificates;
use crate::common::*;
use kvferry_agent::{
    Ended, Error, Failure, Key, Outcome, PeerError, Scheduler, SchedulerOptions, Tls, TlsFiles,
    Trust, Version, ask_status,
};

fn key(secret: &str) -> Trust {
    Trust::Key(Key::new(secret.as_bytes()).unwrap())
}

const SECRET: &str = "the secret of these tests";

fn hand_over(p: &Engine, d: &Engine, name: &str, address: &str) -> Vec<Outcome> {
    p.hand_over(d, name, 9, address)
}

#[test]
fn both_sides_hold_the_key() {
    let p = Recipe::new("p", 2).trust(key(SECRET)).start();
    let d = Recipe::new("d", 1).trust(key(SECRET)).start();
    let wire = Wire::to(p.scheduler.address());
    assert_eq!(hand_over(&p, &d, "r", &wire.address), [Outcome::Done]);
    let said = wire.heard().concat();
    assert!(said.len() > 200);
    let seen = |word: &[u8]| said.windows(word.len()).any(|window| window == word);
    assert!(!seen(b"layers") && !seen(b"tiny"), "the model's name is not in the clear");
}

/// The same, the other way round: without a key the words are there to be seen.
#[test]
fn without_a_key_everything_can_be_read() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 1).start());
    let wire = Wire::to(p.scheduler.address());
    assert_eq!(hand_over(&p, &d, "r", &wire.address), [Outcome::Done]);
    let said = wire.heard().concat();
    assert!(said.windows(6).any(|window| window == b"layers"));
}

/// At the first try, and for what it is.
#[test]
fn another_key_or_none_is_refused_on_both_sides() {
    let (none, key_, other) = (Trust::Loopback, key(SECRET), key("another secret of these tests"));
    for (ours, theirs, expected) in [
        (&key_, &other, PeerError::Untrusted),
        (&key_, &none, PeerError::OtherTrust { theirs: 0, ours: 1 }),
        (&none, &key_, PeerError::OtherTrust { theirs: 1, ours: 0 }),
    ] {
        let p = Recipe::new("p", 1).trust(theirs.clone()).start();
        let d = Recipe::new("d", 1).trust(ours.clone()).start();
        let address = p.scheduler.address().to_owned();
        let outcome = hand_over(&p, &d, "r", &address).remove(0);
        assert_eq!(outcome, Outcome::Failed(Failure::Refused(expected.to_string())));
        assert_eq!(ask_status(&address, ours, LONG), Err(expected));
        assert_eq!(d.ranks[0].touched(), 0);
        // Whoever is turned away may know it before it is counted.
        eventually("both were turned away", || p.counter("connections_turned_away") >= 2);
        assert_eq!(p.counter("connections"), 0);
    }
}

/// As the page on operations has a key changed: in each step some servers have gone it, and some have not.
#[test]
fn a_key_is_changed_without_a_refused_request() {
    let [old, new] = ["the old secret of these tests", "the new secret of these tests"];
    let steps =
        [old.to_owned(), format!("{old}\n{new}"), format!("{new}\n{old}\n"), new.to_owned()];
    for pair in steps.windows(2) {
        for (ours, theirs) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let p = Recipe::new("p", 1).trust(key(&pair[theirs])).start();
            let d = Recipe::new("d", 1).trust(key(&pair[ours])).start();
            let address = p.scheduler.address().to_owned();
            assert_eq!(hand_over(&p, &d, "r", &address), [Outcome::Done], "{pair:?}");
        }
    }
    // Who skips a step is refused.
    let (p, d) = (Recipe::new("p", 1).trust(key(old)), Recipe::new("d", 1).trust(key(&steps[2])));
    let (p, d) = (p.start(), d.start());
    let outcome = hand_over(&p, &d, "r", p.scheduler.address()).remove(0);
    assert_eq!(outcome, Outcome::Failed(Failure::Refused(PeerError::Untrusted.to_string())));
}

/// Only how it would have to prove itself, and that it has not.
#[test]
fn a_stranger_is_told_nothing() {
    let p = Recipe::new("p", 1).trust(key(SECRET)).start();
    let wrong_proof = b"kvferry\x01\x01\x30\x00123456789012345678901234567890123456789012345678";
    let openings: [(&[u8], usize); 6] = [
        (b"GET / HTTP/1.1\r\n\r\n", 0),
        (b"kvferry\x01\x00\x04\x00\x00\x00\x01\x00\x01\x00", 9),
        (b"kvferry\x01\x02\x16\x03\x01", 9),
        (b"kvferry\x01\x01\xff\xff", 0),
        (&wrong_proof[..40], 0),
        (wrong_proof, 2 + 48),
    ];
    for (opening, answered) in openings {
        let mut stream = TcpStream::connect(p.scheduler.address()).unwrap();
        stream.write_all(opening).unwrap();
        // The other side may hang up before it has read everything.
        _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = vec![];
        _ = stream.read_to_end(&mut answer);
        assert_eq!(answer.len(), answered, "{opening:?}: {answer:?}");
        if answered == 9 {
            assert_eq!(answer, b"kvferry\x01\x01");
        }
    }
    eventually("all were turned away", || {
        p.counter("connections_turned_away") == openings.len() as u64
    });
    assert!(ask_status(p.scheduler.address(), &key(SECRET), LONG).is_ok());
}

/// What was recorded from a connection opens no other, and does nothing there.
#[test]
fn a_replay_does_nothing() {
    let p = Recipe::new("p", 1).trust(key(SECRET)).start();
    let d = Recipe::new("d", 1).trust(key(SECRET)).start();
    let wire = Wire::to(p.scheduler.address());
    let mut ticket = p.grant("r", &[1], 4);
    ticket.address = wire.address.clone();
    d.scheduler.hold(&ticket, LONG);
    d.scheduler.abandon(&ticket);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
    let recorded = wire.heard().concat();

    let before = p.counter("connections");
    let mut stream = TcpStream::connect(p.scheduler.address()).unwrap();
    stream.write_all(&recorded).unwrap();
    let mut answer = vec![];
    _ = stream.read_to_end(&mut answer);
    // Two bytes of length, an ephemeral key and a tag: new for every connection, and all there is.
    assert_eq!(answer.len(), 2 + 32 + 16);
    eventually("turned away", || p.counter("connections_turned_away") == 1);
    assert_eq!(p.counter("connections"), before);
}

/// A message that is altered on its way ends the connection; the request asks again on another.
#[test]
fn an_altered_message_is_not_believed() {
    let p = Recipe::new("p", 1).trust(key(SECRET)).start();
    let d = Recipe::new("d", 1).trust(key(SECRET)).start();
    let wire = Wire::to(p.scheduler.address());
    // Past the opening: inside the question whether the two fit.
    wire.flip_after(150);
    assert_eq!(hand_over(&p, &d, "r", &wire.address), [Outcome::Done]);
    assert_eq!(p.counter("connections_misbehaved"), 1);
    assert!(wire.heard().len() >= 2);
}

/// How a peer of today opens a connection without protection, under the name of x.
fn hello() -> Vec<u8> {
    let Version { major, minor } = Version::CURRENT;
    let version = [major.to_le_bytes(), minor.to_le_bytes()].concat();
    [b"kvferry\x01\x00\x06\x00\x00\x00", &*version, b"\x01x"].concat()
}

/// Garbage from a peer that is let in ends its own connection and nothing else.
#[test]
fn garbage_ends_only_its_own_connection() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let address = p.scheduler.address().to_owned();
    assert_eq!(hand_over(&p, &d, "r1", &address), [Outcome::Done]);
    for garbage in
        [&b"\x04\x00\x00\x00\xff\xff\xff\xff"[..], b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"]
    {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(&hello()).unwrap();
        stream.write_all(garbage).unwrap();
        let mut answer = vec![];
        _ = stream.read_to_end(&mut answer);
        assert!(!answer.is_empty(), "it was welcome until then");
    }
    eventually("each is counted", || p.counter("connections_misbehaved") == 3);
    let handshakes = "kvferry_handshakes_total{engine=\"d\",rank=\"0\"} 1";
    assert_eq!(hand_over(&p, &d, "r2", &address), [Outcome::Done]);
    assert!(d.ranks[0].worker.metrics().contains(handshakes), "the other peer noticed nothing");
}

/// Connections that say nothing, one byte at a time, or come by the hundreds keep nobody out.
#[test]
fn a_slow_loris_keeps_nobody_out() {
    let mut p = Recipe::new("p", 1).trust(key(SECRET));
    p.scheduler.limits.strangers = 8;
    p.scheduler.limits.opening = Duration::from_secs(600);
    let p = p.start();
    let lazy: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(p.scheduler.address()).unwrap();
            stream.write_all(b"kvf").unwrap();
            stream
        })
        .collect();
    let d = Recipe::new("d", 1).trust(key(SECRET)).start();
    let address = p.scheduler.address().to_owned();
    assert_eq!(hand_over(&p, &d, "r", &address), [Outcome::Done]);
    // All but the last eight, and one more to make room for D.
    assert_eq!(p.counter("connections_turned_away"), 193);
    drop(lazy);
}

#[test]
fn a_connection_must_prove_itself_in_time() {
    let mut p = Recipe::new("p", 1).trust(key(SECRET));
    p.scheduler.limits.opening = Duration::from_millis(50);
    let p = p.start();
    let mut stream = TcpStream::connect(p.scheduler.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "hung up");
}

/// Whoever comes when all places are taken gets that of who was quiet for longest.
#[test]
fn there_is_room_for_so_many() {
    let mut p = Recipe::new("p", 1);
    p.scheduler.limits.connections = 1;
    let p = p.start();
    let mut first = TcpStream::connect(p.scheduler.address()).unwrap();
    first.write_all(&hello()).unwrap();
    let mut welcome = [0; 8];
    first.read_exact(&mut welcome).unwrap();
    eventually("the first is in", || p.scheduler.status().peers.len() == 1);
    let status = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap();
    assert_eq!(status.peers.len(), 1);
    assert_eq!(p.counter("connections_turned_away"), 1);
    let mut rest = vec![];
    first.read_to_end(&mut rest).unwrap();
    eventually("the second has left", || p.scheduler.status().peers.is_empty());
}

/// A manifest that is sound in itself, but claims memory that its rank has not registered.
#[test]
fn a_manifest_that_lies_about_its_bounds_is_found_out_by_the_transport() {
    for by in [By::Tcp, By::Local] {
        let mut liar = Recipe::new("p", 1).by(by);
        liar.lie = 64 * TOKENS_PER_BLOCK * HEADS * DIM;
        let (p, d) = (liar.start(), Recipe::new("d", 1).by(by).start());
        let ticket = p.grant("lie", &[BLOCKS + 3], 4);
        d.start_load("lie", &ticket, &[BLOCKS + 3], &[1], 4, LONG);
        match &d.wait_ends("lie")[0] {
            Outcome::Failed(Failure::Transport(reason)) => {
                assert!(reason.contains("outside the registered regions"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(d.ranks[0].touched(), 0);
        let address = p.scheduler.address().to_owned();
        assert_eq!(hand_over(&p, &d, "truth", &address), [Outcome::Done]);
    }
}

#[test]
fn an_address_that_others_can_reach_needs_a_key() {
    let mut options = SchedulerOptions::new("p");
    options.bind = ([0, 0, 0, 0], 0).into();
    match Scheduler::start(options) {
        Err(Error::NeedsKey(_)) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn certificates_instead_of_a_key() {
    let directory = std::env::temp_dir().join(format!("kvferry-tls-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let ours = certificates(&directory, "ours");
    let theirs = certificates(&directory, "theirs");
    let tls = |files: &TlsFiles| Trust::Tls(Tls::from_files(files).unwrap());
    let p = Recipe::new("p", 2).trust(tls(&ours)).start();
    let d = Recipe::new("d", 1).trust(tls(&ours)).start();
    let address = p.scheduler.address().to_owned();
    assert_eq!(hand_over(&p, &d, "r1", &address), [Outcome::Done]);

    // A certificate of another authority, and the right authority to check P by.
    let mixed = TlsFiles { authority: ours.authority.clone(), ..theirs.clone() };
    for (stranger, expected) in [
        (tls(&theirs), "TLS: invalid peer certificate"),
        // P says so, when D has already proven all that it can.
        (tls(&mixed), "TLS: received fatal alert"),
        (Trust::Loopback, "the peer expects TLS, this side has no protection"),
        (key(SECRET), "the peer expects TLS, this side has a shared key"),
    ] {
        let d = Recipe::new("d", 1).trust(stranger).start();
        match hand_over(&p, &d, "r2", &address).remove(0) {
            Outcome::Failed(Failure::Refused(why)) => assert!(why.starts_with(expected), "{why}"),
            other => panic!("{other:?}, not {expected}"),
        }
        assert_eq!(d.ranks[0].touched(), 0);
        p.scheduler.revoke("r2");
    }
    for (files, problem) in [
        (TlsFiles { certificate: "no such file".into(), ..ours.clone() }, "no such file"),
        (
            TlsFiles { authority: ours.private_key.clone(), ..ours.clone() },
            "it holds no certificate",
        ),
        (
            TlsFiles { private_key: theirs.private_key, ..ours },
            "does not belong to the certificate",
        ),
    ] {
        match Tls::from_files(&files) {
            Err(Error::Key(message)) => assert!(message.contains(problem), "{message}"),
            other => panic!("{other:?}"),
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}
