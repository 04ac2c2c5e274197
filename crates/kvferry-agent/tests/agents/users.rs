//! Without a key, whose process is at the other end is what the kernel says: another user learns nothing.
//!
//! A socket belongs to the user that the thread which made it acts as, so that one process can play two. (For that, the
//! tests run as root.)

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use kvferry_agent::{PeerError, Scheduler, SchedulerOptions, Trust, ask_drain, ask_status};

const PATIENCE: Duration = Duration::from_secs(20);
const NOBODY: u32 = 65534;

/// What happens on a thread whose sockets are another user's.
fn as_nobody<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    thread::spawn(|| {
        // SAFETY: these change the credentials of this thread alone, and touch no memory.
        let now = unsafe {
            libc::setfsuid(NOBODY);
            libc::setfsuid(NOBODY)
        };
        assert_eq!(now.cast_unsigned(), NOBODY, "the tests of other users run as root");
        act()
    })
}

fn engine(trust: Trust) -> Scheduler {
    let mut options = SchedulerOptions::new("prefill");
    options.trust = trust;
    Scheduler::start(options).unwrap()
}

#[test]
fn another_user_is_told_nothing_and_changes_nothing() {
    let scheduler = engine(Trust::Loopback);
    let address = scheduler.address().to_owned();
    assert_eq!(ask_status(&address, &Trust::Loopback, PATIENCE).unwrap().engine, "prefill");

    let there = address.clone();
    let asked = as_nobody(move || {
        (
            ask_status(&there, &Trust::Insecure, Duration::from_secs(2)),
            ask_drain(&there, &Trust::Insecure, Duration::from_secs(2), true),
        )
    });
    let (status, drained) = asked.join().unwrap();
    assert!(status.is_err() && drained.is_err(), "{status:?} {drained:?}");
    assert!(!scheduler.draining());

    // Not a byte, whatever it says first.
    let there = address.clone();
    let heard = as_nobody(move || {
        let mut stream = TcpStream::connect(there).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        _ = stream.write_all(b"kvferry\x01\x00");
        let mut heard = vec![];
        _ = stream.read_to_end(&mut heard);
        heard
    });
    assert_eq!(heard.join().unwrap(), b"");
    assert_eq!(ask_status(&address, &Trust::Loopback, PATIENCE).unwrap().engine, "prefill");
}

#[test]
fn insecure_means_all_users_too() {
    let scheduler = engine(Trust::Insecure);
    let address = scheduler.address().to_owned();
    let asked = as_nobody(move || ask_status(&address, &Trust::Insecure, PATIENCE));
    assert_eq!(asked.join().unwrap().unwrap().engine, "prefill");
}

/// Somebody else listens where an engine did, and answers as a real one would.
#[test]
fn another_user_who_listens_is_not_believed() {
    let scheduler = engine(Trust::Loopback);
    let (send, taken) = std::sync::mpsc::channel();
    let (tell, told) = std::sync::mpsc::channel();
    let squatter = as_nobody(move || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        tell.send(listener.local_addr().unwrap().to_string()).unwrap();
        send.send(listener.accept().unwrap().0).unwrap();
    });
    let there = scheduler.address().to_owned();
    let relay = thread::spawn(move || {
        let client: TcpStream = taken.recv().unwrap();
        let server = TcpStream::connect(there).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let up = thread::spawn(move || {
            _ = std::io::copy(&mut from, &mut to);
            _ = to.shutdown(Shutdown::Write);
        });
        _ = std::io::copy(&mut &server, &mut &client);
        _ = client.shutdown(Shutdown::Both);
        _ = server.shutdown(Shutdown::Both);
        _ = up.join();
    });
    let address = told.recv().unwrap();
    let error = ask_status(&address, &Trust::Loopback, PATIENCE).unwrap_err();
    assert!(matches!(error, PeerError::OtherUser { theirs: NOBODY, .. }), "{error:?}");
    assert!(error.to_string().contains("65534") && error.to_string().contains("key"), "{error}");
    squatter.join().unwrap();
    relay.join().unwrap();
}
