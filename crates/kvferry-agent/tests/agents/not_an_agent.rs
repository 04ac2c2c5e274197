//! A ticket, or an operator, that names an address where something else listens: what was found is said.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::certificates::certificates;
use crate::common::*;
use kvferry_agent::{Failure, Key, Outcome, PeerError, Tls, Trust, ask_status};

/// For whoever waits until the end of it.
const SHORT: Duration = Duration::from_secs(3);
const HTTP: &[u8] = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request";
const IT_SAYS: &str = "whoever listens there is not a kvferry agent: it says ";
const NOT_GREETED: &str = "whoever listens there has not greeted as a kvferry agent does: ";

/// What answers every connection, most in the same way.
#[derive(Clone, Copy)]
enum Listener {
    /// Says this as soon as it has heard something.
    Says(&'static [u8]),
    Hangs,
    /// Closes when it has heard something.
    Closes,
    /// The first time. Then it hangs.
    ClosesOnce,
}

impl Listener {
    /// Its address.
    fn start(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut open: Vec<TcpStream> = vec![];
            for (number, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let this = match self {
                    Self::ClosesOnce if number == 0 => Self::Closes,
                    Self::ClosesOnce => Self::Hangs,
                    other => other,
                };
                if !matches!(this, Self::Hangs) {
                    _ = stream.read(&mut [0; 4096]);
                }
                if let Self::Says(bytes) = this {
                    stream.write_all(bytes).unwrap();
                }
                if !matches!(this, Self::Closes) {
                    open.push(stream);
                }
            }
        });
        address
    }
}

fn key() -> Trust {
    Trust::Key(Key::new(b"a secret that both sides share").unwrap())
}

/// Certificates that are gone when the test ends.
struct Certified(PathBuf);

impl Certified {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("kvferry-not-an-agent-{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn trust(&self, name: &str) -> Trust {
        Trust::Tls(Tls::from_files(&certificates(&self.0, name)).unwrap())
    }
}

impl Drop for Certified {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How a load from this address ends, and how long that takes.
fn load_from(address: String, trust: Trust, handshake: Duration) -> (Outcome, Duration) {
    let p = Recipe::new("p", 1).start();
    let mut d = Recipe::new("d", 1).trust(trust);
    d.worker.handshake = handshake;
    let d = d.start();
    let mut ticket = p.grant("r", &[1], 1);
    ticket.address = address;
    let began = Instant::now();
    d.start_load("r", &ticket, &[1], &[1], 1, LONG);
    let outcome = d.wait_ends("r").remove(0);
    assert_eq!(d.ranks[0].touched(), 0);
    (outcome, began.elapsed())
}

#[test]
fn what_something_else_says_is_shown_at_once() {
    let cases: [(&'static [u8], &str); 4] = [
        (HTTP, r#""HTTP/1.1 400 Bad Request""#),
        (b"SSH-2.0-OpenSSH_9.2\r\n", r#""SSH-2.0-OpenSSH_9.2""#),
        // As of a telnet server: what cannot be printed is written as numbers.
        (b"\xff\xfd\x18\xff", r#""\xff\xfd\x18\xff""#),
        // Too short for any greeting.
        (&[0; 4], r#""\x00\x00\x00\x00""#),
    ];
    let certified = Certified::new();
    let tls = certified.trust("d");
    for (says, shown) in cases {
        for trust in [Trust::Loopback, key(), tls.clone()] {
            let (outcome, took) = load_from(Listener::Says(says).start(), trust, LONG);
            let Outcome::Failed(Failure::Refused(reason)) = outcome else { panic!("{outcome:?}") };
            assert_eq!(reason, format!("{IT_SAYS}{shown}"));
            assert!(took < LONG / 2, "{took:?}");
        }
    }
    let address = Listener::Says(HTTP).start();
    let answer = ask_status(&address, &Trust::Loopback, LONG).unwrap_err();
    assert_eq!(answer, PeerError::NotAnAgent("HTTP/1.1 400 Bad Request".to_owned()));
}

/// It may be an agent that will be well again: tried until the end.
#[test]
fn silence_is_not_the_networks() {
    let certified = Certified::new();
    let tls = certified.trust("d");
    for (listener, trust, how) in [
        (Listener::Hangs, Trust::Loopback, "nothing came in time"),
        (Listener::Hangs, key(), "nothing came in time"),
        (Listener::Hangs, tls.clone(), "nothing came in time"),
        (Listener::Closes, Trust::Loopback, "it closed the connection"),
        // As an agent of an earlier release with another key.
        (Listener::Closes, key(), "it closed the connection"),
        (Listener::Closes, tls.clone(), "it closed the connection"),
        // The end comes during a later try, which says less.
        (Listener::ClosesOnce, Trust::Loopback, "it closed the connection"),
        // Ten bytes of a longer message, as the side channel of vLLM's own connector sends them first.
        (Listener::Says(b"\xff\0\0\0\0\0\0\0\x01\x7f"), Trust::Loopback, "nothing came in time"),
    ] {
        let (outcome, _) = load_from(listener.start(), trust, SHORT);
        let Outcome::Failed(Failure::PeerGone(reason)) = outcome else { panic!("{outcome:?}") };
        assert!(reason.starts_with(&format!("{NOT_GREETED}{how}")), "{reason}");
    }
    for trust in [Trust::Loopback, tls] {
        let answer = ask_status(&Listener::Closes.start(), &trust, LONG).unwrap_err();
        assert_eq!(answer, PeerError::NoGreeting("it closed the connection"));
    }
    let answer = ask_status(&Listener::Hangs.start(), &Trust::Loopback, SHORT).unwrap_err();
    assert_eq!(answer, PeerError::NoGreeting("nothing came in time"));
}

/// An agent, but not with TLS; and one with TLS, but of another authority.
#[test]
fn an_agent_without_tls_is_not_one_with_other_certificates() {
    let certified = Certified::new();
    let tls = certified.trust("d");
    for (theirs, trust) in [(0, Trust::Loopback), (1, key())] {
        let p = Recipe::new("p", 1).trust(trust).start();
        let answer = ask_status(p.scheduler.address(), &tls, LONG).unwrap_err();
        assert_eq!(answer, PeerError::OtherTrust { theirs, ours: 2 });
    }
    let p = Recipe::new("p", 1).trust(certified.trust("p")).start();
    let answer = ask_status(p.scheduler.address(), &tls, LONG).unwrap_err();
    let PeerError::Tls(why) = answer else { panic!("{answer:?}") };
    assert!(why.contains("invalid peer certificate"), "{why}");
}

#[test]
fn where_nobody_listens_the_system_says_so() {
    let nobody = quiet_address().to_string();
    let (outcome, _) = load_from(nobody, Trust::Loopback, SHORT);
    assert_eq!(
        outcome,
        Outcome::Failed(Failure::PeerGone("connecting: connection refused".to_owned()))
    );
}
