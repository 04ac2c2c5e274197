//! Addresses at which nobody answers, and engines that take long to let go of.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use kvferry_agent::{Ended, Failure, Following, Outcome, Ticket};
use kvferry_transport::Error;

use crate::common::*;

/// Takes connections and says nothing.
struct Silent {
    port: u16,
    accepted: Arc<AtomicUsize>,
    most_open: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Silent {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let this = Self {
            port,
            accepted: <_>::default(),
            most_open: <_>::default(),
            stop: <_>::default(),
        };
        let (accepted, most) = (this.accepted.clone(), this.most_open.clone());
        let stop = this.stop.clone();
        thread::spawn(move || {
            let mut open: Vec<TcpStream> = vec![];
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                open.retain(is_open);
                open.push(stream.unwrap());
                accepted.fetch_add(1, Ordering::SeqCst);
                most.fetch_max(open.len(), Ordering::SeqCst);
            }
        });
        this
    }

    /// The number of an address of it: there are as many as one wants.
    fn address(&self, number: usize) -> String {
        format!("0x{}7f000001:{}", "0".repeat(number), self.port)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Whoever has connected has said something, and not gone.
fn is_open(stream: &TcpStream) -> bool {
    use std::io::Read;
    stream.set_nonblocking(true).unwrap();
    let mut said = [0; 256];
    loop {
        match (&mut &*stream).read(&mut said) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}

fn at(ticket: &Ticket, address: String) -> Ticket {
    Ticket { address, ..ticket.clone() }
}

#[test]
fn who_waits_for_an_answer_takes_nobodys_turn_and_bounded_places() {
    let p = Recipe::new("p", 1).start();
    let other = Recipe::new("other", 1).start();
    let mut d = Recipe::new("d", 1);
    d.worker.concurrent = 1;
    let d = d.start();
    let silent = Silent::start();
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    let read = |from: &Engine, name: &str| {
        from.prefill(1, &source, 8);
        let ticket = from.grant(name, &source, 8);
        d.start_load(name, &ticket, &source, &destination, 8, LONG);
        assert_eq!(d.wait_ends(name), [Outcome::Done], "{name}");
    };
    read(&p, "first");
    let ticket = p.grant("ticket", &source, 8);
    for number in 0..400 {
        let ticket = at(&ticket, silent.address(number));
        d.start_load(&format!("silent {number}"), &ticket, &source, &destination, 8, LONG);
    }
    let most = || silent.most_open.load(Ordering::SeqCst);
    eventually("many are tried at once", || most() >= 100);
    read(&p, "known");
    read(&other, "new");
    let tried = || silent.accepted.load(Ordering::SeqCst);
    eventually("each has its turn", || tried() >= 300);
    let waiting: HashSet<_> =
        d.ranks[0].worker.loads().into_iter().map(|(_, doing)| doing).collect();
    assert_eq!(waiting, ["shaking hands"].into());
    assert_eq!(d.ranks[0].worker.loads().len(), 400, "all of them wait");
    assert!(most() <= 128 + 64, "{} connections at a time", most());
}

/// A ticket may name any address: a request that has failed knocks there no more. Here somebody answers at last, who
/// would hear it.
#[test]
fn nothing_is_given_up_where_nobody_ever_answered() {
    let p = Recipe::new("p", 1).start();
    let mut d = Recipe::new("d", 1);
    d.worker.handshake = Duration::from_secs(3);
    let d = d.start();
    let wire = Wire::to(p.scheduler.address());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    let load = |name: &str| {
        let ticket = at(&p.grant(name, &source, 8), wire.address.clone());
        d.start_load(name, &ticket, &source, &destination, 8, LONG);
        d.wait_ends(name).remove(0)
    };
    wire.stop();
    let outcome = load("unanswered");
    assert!(matches!(outcome, Outcome::Failed(Failure::PeerGone(_))), "{outcome:?}");
    wire.go();
    assert_eq!(load("answered"), Outcome::Done);
    assert_eq!(p.wait_released().request, "answered");
    assert!(p.scheduler.granted("unanswered").is_some());
}

/// The scheduler of D knocks there only to keep the lease alive.
#[test]
fn a_scheduler_gives_nothing_up_where_nobody_ever_answered() {
    let p = Recipe::new("p", 1).start();
    let d = Recipe::new("d", 1).start();
    let silent = Silent::start();
    // One after the other is accepted: who connects here comes after all that were there before.
    let came = || {
        let before = silent.accepted.load(Ordering::SeqCst);
        drop(TcpStream::connect(("127.0.0.1", silent.port)).unwrap());
        eventually("it is accepted", || silent.accepted.load(Ordering::SeqCst) > before);
        silent.accepted.load(Ordering::SeqCst)
    };
    let give_up = |address: String| {
        let ticket = p.grant("r", &[1], 4);
        d.scheduler.abandon(&at(&ticket, address));
        p.scheduler.revoke("r");
        p.wait_released();
        // What was given up before it was told by then.
        let known = p.grant("known", &[1], 4);
        d.scheduler.hold(&known, LONG);
        d.scheduler.abandon(&known);
        assert_eq!(p.wait_released().request, "known");
    };
    let before = came();
    give_up(silent.address(0));
    assert_eq!(came(), before + 1, "it was never held");
    let mut ticket = p.grant("lost", &[1], 4);
    (ticket.address, ticket.term_ms) = (silent.address(0), 200);
    d.scheduler.hold(&ticket, LONG);
    eventually("it is lost", || !d.scheduler.lost().is_empty());
    p.scheduler.revoke("lost");
    p.wait_released();
    let before = came();
    give_up(silent.address(0));
    assert_eq!(came(), before + 1, "it did not answer while it was held");
}

/// A request that is followed by its ticket, and given up before its engine has said anything: the lease is not kept
/// alive any more.
#[test]
fn what_is_followed_is_given_up_before_it_is_heard_of() {
    let p = Recipe::new("p", 1).start();
    let d = Recipe::new("d", 1).start();
    let wire = Wire::to(p.scheduler.address());
    wire.stop();
    let ticket = at(&p.grant("r", &[1], 4), wire.address.clone());
    d.scheduler.follow("r", Following::Ticket(ticket), LONG).unwrap();
    eventually("it is held", || d.scheduler.left().holds == 1);
    d.scheduler.unfollow("r");
    assert_eq!(d.scheduler.left().holds, 0);
    wire.go();
    assert_eq!(p.wait_released().why, Ended::Abandoned);
}

/// Its memory stays mapped as long as it is not let go of.
#[test]
fn a_busy_address_keeps_nobody_else_from_being_let_go_of() {
    let p = Recipe::new("p", 1).by(By::Held).start();
    let d = Recipe::new("d", 1).by(By::Held).start();
    let held = d.ranks[0].held.as_ref().unwrap();
    let silent = Silent::start();
    let ticket = p.grant("r", &[1], 4);
    let unanswered = at(&ticket, format!("127.0.0.1:{}", silent.port));
    d.start_load("unanswered", &unanswered, &[1], &[9], 4, LONG * 2);
    d.start_load("r", &ticket, &[1], &[1], 4, LONG);
    held.next().finish();
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(held.connections(), 1);
    drop(p);
    eventually("P is let go of", || held.connections() == 0);
    assert_eq!(d.ranks[0].worker.loads(), [("unanswered".to_owned(), "shaking hands")]);
}

/// To end a connection may take long. Nobody else waits for that, and whoever wants to read from the same engine gets
/// a new connection, not the one that ends.
#[test]
fn nobody_waits_for_a_connection_that_ends() {
    let (p, other) = (Recipe::new("p", 1).by(By::Held), Recipe::new("other", 1).by(By::Held));
    let (p, other) = (p.start(), other.start());
    let d = Recipe::new("d", 1).by(By::Held).start();
    let held = d.ranks[0].held.as_ref().unwrap();
    let load = |from: &Engine, name: &str| {
        let ticket = from.grant(name, &[1], 4);
        d.start_load(name, &ticket, &[1], &[1], 4, LONG);
    };
    load(&p, "broken");
    held.stuck.store(true, Ordering::SeqCst);
    held.next().settle(Error::PeerLost("as a test wants it".to_owned()));
    let outcome = d.wait_ends("broken").remove(0);
    assert!(matches!(outcome, Outcome::Failed(Failure::PeerGone(_))), "{outcome:?}");
    load(&p, "again");
    load(&other, "meanwhile");
    held.next().finish();
    assert_eq!(d.wait_ends("meanwhile"), [Outcome::Done]);
    assert_eq!(d.ranks[0].worker.loads(), [("again".to_owned(), "shaking hands")]);
    assert_eq!(held.attempts(), 2);
    held.stuck.store(false, Ordering::SeqCst);
    held.next().finish();
    assert_eq!(d.wait_ends("again"), [Outcome::Done]);
    assert_eq!(held.attempts(), 3);
}
