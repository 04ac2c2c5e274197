//! Who has proven nothing yet, and who asks without reading: neither keeps others from being served.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvferry_layout::{ByteCopy, Region};
use kvferry_testkit::one_by_one;
use parking_lot::Mutex;
use socket2::{Domain, Socket, Type};

use super::super::bounds::Bounds;
use super::super::channel::Channel;
use super::super::frame::{Challenge, Hello, Verb};
use super::super::proof::{End, Said, Secret};
use super::super::{Tcp, TcpOptions};
use super::{Guest, OPEN, PAGE, TERMS, Victim, described, let_in, request, socket, soon};
use crate::contract::{Error, Instance, Operation, Status, Transport};
use crate::memory::HostMemory;

/// A host of its own, as far as the books are concerned.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

fn bounds() -> Bounds {
    Bounds {
        strangers: 64,
        connections: 64,
        greeting: Duration::from_secs(60),
        sending: Duration::from_secs(60),
    }
}

fn connect_from(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn has_ended(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let ended = match stream.peek(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).unwrap();
    ended
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = soon();
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Connects as an engine does, and reads a page.
fn read_a_page(victim: &Victim) {
    let memory = HostMemory::new(PAGE).unwrap();
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    // SAFETY: the transport is dropped before the memory.
    unsafe { transport.register(Region::host(memory.base(), PAGE as u64)) }.unwrap();
    let peer = transport.connect(&victim.transport.describe().unwrap(), soon()).unwrap();
    let from = victim.base() + PAGE as u64;
    let copy = ByteCopy { source: from, destination: memory.base(), bytes: PAGE as u64 };
    let status = transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap().wait(soon());
    assert!(matches!(status, Status::Done(_)), "{status:?}");
    assert!(memory.snapshot() == [OPEN; PAGE]);
}

/// The threads of this process that serve somebody, in whichever test.
fn serving() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.starts_with("kvferry-io")).count()
}

#[test]
fn a_crowd_of_strangers_keeps_nobody_out() {
    // Nobody's time ends meanwhile.
    let places = Bounds::of_this_process().strangers;
    let victim = Victim::with(Bounds { strangers: places, ..bounds() });
    let at = victim.address().at;
    // More than there are places, where this process may open so many files itself.
    let crowd = crate::strangers::at_most(4300, 3);
    assert!(crowd > places, "{crowd} connections, {places} places");
    let mut said = 0;
    let mut strangers = Vec::new();
    for number in 0..crowd {
        let mut stranger = connect_from(Ipv4Addr::LOCALHOST, at);
        // Some say nothing, some a little.
        if number % 2 == 0 {
            stranger.write_all(b"k").unwrap();
            said += 1;
        }
        strangers.push(stranger);
        if number % 1000 == 999 {
            read_a_page(&victim);
        }
    }
    // Some go on.
    for stranger in strangers.iter_mut().step_by(10) {
        said += usize::from(stranger.write_all(b"v").is_ok());
    }
    assert!(said > crowd / 2);
    read_a_page(&victim);
    let inside = || strangers.iter().filter(|stranger| !has_ended(stranger)).count();
    wait_until("strangers beyond all places stay", || inside() <= places);
    assert!(victim.transport.statistics().turned_away >= (crowd - places) as u64);
}

/// One that is in the middle of its greeting stays, however many come from elsewhere.
#[test]
fn a_flood_drowns_only_its_own_address() {
    let victim = Victim::with(Bounds { strangers: 8, ..bounds() });
    let address = victim.address();
    let hello = Hello { nonce: [9; 32], terms: TERMS }.encode();
    let mut quiet = connect_from(ELSEWHERE, address.at);
    quiet.write_all(&hello[..20]).unwrap();
    // It has its place once it is the next that goes.
    let flood: Vec<_> = (0..100).map(|_| connect_from(Ipv4Addr::LOCALHOST, address.at)).collect();
    let inside = || flood.iter().filter(|stranger| !has_ended(stranger)).count();
    wait_until("the flood stays", || inside() <= 7);
    quiet.write_all(&hello[20..]).unwrap();
    let mut challenge = [0; Challenge::BYTES];
    quiet.read_exact(&mut challenge).unwrap();
    let Challenge { nonce, terms, .. } = Challenge::decode(&challenge).unwrap();
    let said = Said { hello, nonce, terms };
    quiet.write_all(&address.secret.prove(End::Client, &said)).unwrap();
    let secrets = address.secret.secrets(&said);
    assert!(Guest(Channel::new(socket(quiet), End::Client, terms, &secrets)).is_served());
}

/// What comes late does not buy more time.
#[test]
fn a_greeting_that_trickles_ends_at_its_deadline() {
    let victim = Victim::with(Bounds { greeting: Duration::from_millis(300), ..bounds() });
    let mut stream = connect_from(Ipv4Addr::LOCALHOST, victim.address().at);
    let hello = Hello { nonce: [9; 32], terms: TERMS }.encode();
    // All but the last byte, which would be answered.
    let said = hello[..Hello::BYTES - 1].iter().take_while(|&&byte| {
        std::thread::sleep(Duration::from_millis(100));
        !has_ended(&stream) && stream.write_all(&[byte]).is_ok()
    });
    let said = said.count();
    assert!(said < Hello::BYTES - 1, "all {said} bytes were heard, one by one");
    // One that says everything but its proof ends, too.
    let mut stream = connect_from(Ipv4Addr::LOCALHOST, victim.address().at);
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; Challenge::BYTES]).unwrap();
    assert!(matches!(stream.read(&mut [0]), Ok(0)));
    assert_eq!(victim.transport.statistics().turned_away, 2);
    // And one that is served may be silent.
    let served = connect_from(Ipv4Addr::LOCALHOST, victim.address().at);
    let mut served = Guest::new(served, &victim.address().secret).unwrap();
    assert!(served.is_served());
    std::thread::sleep(Duration::from_millis(400));
    assert!(served.is_served());
}

/// What the transports of this process log.
static LOG: Mutex<Vec<u8>> = Mutex::new(vec![]);

struct ToLog;

impl Write for ToLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The log does not grow as fast as somebody connects.
#[test]
fn an_address_is_turned_away_in_one_line_and_counted() {
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN);
    // Nobody else in these tests reads the log.
    log.with_ansi(false).with_writer(|| ToLog).init();
    let victim = Victim::new();
    let noisy = Ipv4Addr::new(127, 0, 0, 9);
    for _ in 0..50 {
        let mut stream = connect_from(noisy, victim.address().at);
        stream.write_all(&[0; Hello::BYTES]).unwrap();
        wait_until("it was not ended", || has_ended(&stream));
    }
    assert_eq!(victim.transport.statistics().turned_away, 50);
    let log = String::from_utf8(LOG.lock().clone()).unwrap();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("127.0.0.9")).collect();
    assert!(matches!(lines[..], [line] if line.contains("opening bytes")), "{lines:?}");
}

/// Whoever asks and never reads holds neither a thread nor the memory that it asked for.
#[test]
fn who_never_reads_is_let_go() {
    let victim = Victim::with(Bounds { sending: Duration::from_millis(300), ..bounds() });
    let mut guest = victim.enter();
    assert_eq!(victim.transport.server.connections(), 1);
    // 32 MiB: more than any socket keeps.
    let page = (victim.base() + PAGE as u64, PAGE as u64);
    for id in 0..8 {
        guest.ask(&request(Verb::Read, id, &[page; 1024]));
    }
    wait_until("it is still served", || victim.transport.server.connections() == 0);
    read_a_page(&victim);
}

/// However many are served, and however slowly they read: the threads stay as many, and the others are served.
#[test]
fn many_that_do_not_read_are_served_by_few_threads() {
    let victim = Victim::with(Bounds { connections: 256, ..bounds() });
    let page = (victim.base() + PAGE as u64, PAGE as u64);
    let mut guests: Vec<_> = (0..96).map(|_| victim.enter()).collect();
    for guest in &mut guests {
        // 4 MiB: more than a socket takes whose other end does not read.
        guest.ask(&request(Verb::Read, 7, &[page; 1024]));
    }
    read_a_page(&victim);
    let most = std::thread::available_parallelism().unwrap().get().min(8);
    assert!((1..=most).contains(&serving()), "{} threads", serving());
    // None of them has lost anything.
    for guest in guests.iter_mut().rev().step_by(8) {
        let (answer, bytes) = guest.hear().unwrap();
        assert_eq!((answer.id, bytes.len()), (7, 1024 * PAGE));
        assert!(bytes.iter().all(|&byte| byte == OPEN));
    }
}

/// An address that takes all it can get leaves as much for the others, and is not answered until it has given some back.
#[test]
fn no_address_takes_all_connections() {
    let victim = Victim::with(Bounds { connections: 4, ..bounds() });
    let address = victim.address();
    let enter = |from| {
        let mut guest = Guest::new(connect_from(from, address.at), &address.secret).ok()?;
        guest.is_served().then_some(guest)
    };
    let mut greedy: Vec<_> = (0..2).map(|_| enter(Ipv4Addr::LOCALHOST).unwrap()).collect();
    assert!(enter(Ipv4Addr::LOCALHOST).is_none(), "it has half of them");
    let other = enter(ELSEWHERE);
    assert!(other.is_some());
    assert_eq!(victim.transport.statistics().turned_away, 1);
    // An engine that comes from there waits for its turn.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("nobody waits", || victim.transport.statistics().turned_away > 2);
            drop(other);
            greedy.clear();
        });
        read_a_page(&victim);
    });
}

#[test]
fn a_connection_that_ends_without_an_answer_is_opened_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let secret = Secret { instance: Instance([5; 16]), token: [7; 32] };
    let description = described(&secret, &listener);
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let server = std::thread::spawn(move || {
        // With an end, and with a reset: what the second has said is not read.
        let (mut first, _) = listener.accept().unwrap();
        first.read_exact(&mut [0; Hello::BYTES]).unwrap();
        drop(first);
        let (mut second, _) = listener.accept().unwrap();
        second.read_exact(&mut [0]).unwrap();
        drop(second);
        let_in(&listener, &secret).unwrap()
    });
    transport.connect(&description, soon()).unwrap();
    server.join().unwrap();
}

#[test]
fn a_port_that_never_answers_is_named_with_both_causes() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let secret = Secret { instance: Instance([5; 16]), token: [7; 32] };
    let description = described(&secret, &listener);
    let at = listener.local_addr().unwrap();
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Until somebody comes who says something else.
            while let Ok((mut stream, _)) = listener.accept() {
                let mut byte = [0];
                if stream.read_exact(&mut byte).is_err() || byte == *b"!" {
                    return;
                }
            }
        });
        let deadline = Instant::now() + Duration::from_millis(500);
        let result = transport.connect(&description, deadline);
        TcpStream::connect(at).unwrap().write_all(b"!").unwrap();
        let Err(Error::PeerLost(why)) = result else { panic!("{result:?}") };
        assert!(why.contains("too many") && why.contains("another version"), "{why}");
    });
}
