//! What packing does when it cannot be done.

use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Loops, Place};

use super::super::frame::{Request, Verb, Verdict};
use super::super::{Tcp, TcpOptions, TcpPeer, gather, parse};
use super::{Guest, OPEN, PAGE, Victim, soon};
use crate::contract::{Operation, Report, Status, Transport};
use crate::memory::HostMemory;
use crate::shared::staging::Use;

const BYTES: usize = 8 << 20;

struct End {
    transport: Tcp,
    memory: HostMemory,
}

impl End {
    fn new(staging: u64, fill: u8) -> Self {
        let memory = HostMemory::new(BYTES).unwrap();
        memory.write(0, &vec![fill; BYTES]);
        let transport = Tcp::new(TcpOptions { staging, ..TcpOptions::default() }).unwrap();
        let end = Self { transport, memory };
        // SAFETY: the transport is dropped before the memory, in the order of the fields; the
        // memory is only touched through its address.
        unsafe { end.transport.register(end.memory.region()) }.unwrap();
        end
    }

    fn connect(&self, description: &[u8]) -> TcpPeer {
        self.transport.connect(description, soon()).unwrap()
    }
}

/// Half of all bytes, in runs of 512.
fn every_other(from: u64, to: &End) -> Loops {
    let mut loops = Loops::default();
    let block = 16 << 10;
    let table = loops
        .add_table((0..(BYTES / block) as u32).map(|at| BlockPair { source: at, destination: at }));
    let runs = Loop { count: 16, source: 1024, destination: 1024 };
    let start = (from, to.memory.base());
    loops.add_nest(start, 512, (block as u64, block as u64), &[runs], table).unwrap();
    loops
}

fn check(operation: &impl Operation, destination: &End, fill: u8, before: u8) -> Report {
    let status = operation.wait(soon());
    let Status::Done(report) = status else { panic!("{status:?}") };
    let byte = |at: usize| if at % 1024 < 512 { fill } else { before };
    let wrong =
        destination.memory.snapshot().into_iter().enumerate().find(|&(at, b)| b != byte(at));
    assert_eq!(wrong, None);
    report
}

/// The source gives a slot back when the last of it is on its way, which the reader may know first.
fn wait_until_nothing_is_staged(source: &End) {
    let until = Instant::now() + Duration::from_secs(20);
    while source.transport.staging().in_use > 0 {
        assert!(Instant::now() < until, "a slot never came back");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A pool of one slot, and more readers than that: all of them get their bytes, whoever packs, and the
/// slot comes back.
#[test]
fn a_tiny_pool_serves_everybody() {
    let source = End::new(gather::SLOT_BYTES, 7);
    let (description, base) = (source.transport.describe().unwrap(), source.memory.base());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let reader = End::new(0, 1);
                let peer = reader.connect(&description);
                let loops = every_other(base, &reader);
                let read = || reader.transport.read_packed(&peer, &loops, soon()).unwrap();
                let operations: Vec<_> = (0..3).map(|_| read()).collect();
                // All write the same memory: nobody looks at it before the last has ended.
                for operation in &operations {
                    operation.wait(soon());
                }
                operations.iter().for_each(|operation| {
                    check(operation, &reader, 7, 1);
                });
            });
        }
    });
    wait_until_nothing_is_staged(&source);
    let staging = source.transport.staging();
    assert_eq!(staging.bytes, gather::SLOT_BYTES, "{staging:?}");
    assert_eq!(staging.most_in_use, gather::SLOT_BYTES);
    assert!(staging.packed > 0, "{staging:?}");
}

/// A source all of whose slots are in use for longer than it waits for one: who asks waits for its turn, and what
/// was to be packed is.
#[test]
fn who_finds_no_slot_asks_again() {
    let source = End::new(2 * gather::SLOT_BYTES, 7);
    let staging = &source.transport.areas.of(Place::Host).unwrap().staging;
    let reader = End::new(0, 1);
    let peer = reader.connect(&source.transport.describe().unwrap());
    wait_until_nothing_is_staged(&source);
    let kept: Vec<_> = (0..2).map(|_| staging.take(Use::Peer, Duration::ZERO)).collect();
    let loops = every_other(source.memory.base(), &reader);
    let operation = reader.transport.read_packed(&peer, &loops, soon()).unwrap();
    // Several times, each as long as a connection waits.
    let before = staging.statistics().waits;
    let until = Instant::now() + Duration::from_secs(20);
    while staging.statistics().waits < before + 4 {
        assert!(Instant::now() < until, "nobody asks: {:?}", staging.statistics());
        assert_eq!(operation.poll(), Status::InProgress);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(kept);
    let report = check(&operation, &reader, 7, 1);
    assert_eq!(report.packed, report.bytes, "{report:?}");
}

/// A reader that has stopped reading keeps the only slot: others are read directly, and nothing hangs.
#[test]
fn who_keeps_a_slot_keeps_nobody_else_out() {
    let source = End::new(gather::SLOT_BYTES, 7);
    let reader = End::new(0, 1);
    let peer = reader.connect(&source.transport.describe().unwrap());
    let mut greedy = greeted(&source.transport);
    let loops = every_other(source.memory.base(), &reader);
    let mut cutting = kvferry_layout::Cutting::default();
    let part = cutting.next(&loops, &gather::LIMITS).unwrap();
    let mut body = vec![];
    gather::encode(&part, &mut body);
    let (spans, bytes) = (body.len() as u32, part.packed_bytes().unwrap());
    // More than any socket takes.
    for id in 0..200 {
        let header = Request { verb: Verb::Gather, spans, id, bytes };
        greedy.ask(&[&header.encode()[..], &body].concat());
    }
    let until = Instant::now() + Duration::from_secs(20);
    while source.transport.staging().packed < 2 || source.transport.staging().in_use == 0 {
        assert!(Instant::now() < until, "the slot was never taken");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Once its connection takes no more, the slot is not given back.
    while source.transport.staging().refused == 0 {
        assert!(Instant::now() < until, "{:?}", source.transport.staging());
        let operation = reader.transport.read_packed(&peer, &loops, soon()).unwrap();
        let report = check(&operation, &reader, 7, 1);
        // What was refused was read run by run, and is not said to have been packed.
        let refused = source.transport.staging().refused > 0;
        assert_eq!(refused, report.packed < report.bytes, "{report:?}");
        assert_eq!(refused, report.copies_posted > 1, "{report:?}");
    }
    // When it is gone, the slot is back.
    drop(greedy);
    wait_until_nothing_is_staged(&source);
}

#[test]
fn without_memory_to_pack_into_reads_are_direct() {
    let (source, reader) = (End::new(0, 7), End::new(0, 1));
    let peer = reader.connect(&source.transport.describe().unwrap());
    assert_eq!(reader.transport.packs_below(&peer), 0);
    let loops = every_other(source.memory.base(), &reader);
    let report =
        check(&reader.transport.read_packed(&peer, &loops, soon()).unwrap(), &reader, 7, 1);
    assert_eq!((report.packed, source.transport.staging().packed), (0, 0));
}

/// That all slots are in use is not that there are none.
#[test]
fn a_peer_that_is_busy_when_it_is_connected_to_packs() {
    let (source, reader) = (End::new(gather::SLOT_BYTES, 7), End::new(0, 1));
    let staging = &source.transport.areas.of(Place::Host).unwrap().staging;
    let kept = staging.take(Use::Peer, Duration::ZERO);
    let peer = reader.connect(&source.transport.describe().unwrap());
    drop(kept);
    assert!(reader.transport.packs_below(&peer) > 0);
    let loops = every_other(source.memory.base(), &reader);
    let operation = reader.transport.read_packed(&peer, &loops, soon()).unwrap();
    let report = check(&operation, &reader, 7, 1);
    assert_eq!(report.packed, report.bytes);
}

/// A connection that was let in.
pub(super) fn greeted(transport: &Tcp) -> Guest {
    let address = parse(&transport.describe().unwrap()).unwrap();
    Guest::new(TcpStream::connect(address.at).unwrap(), &address.secret).unwrap()
}

/// A client that asks for what it may not have gets nothing of it.
#[test]
fn gathering_reaches_only_what_is_registered() {
    let victim = Victim::new();
    let page = PAGE as u64;
    let ask = |start: u64, block: u64, highest: u32| {
        let mut loops = Loops::default();
        let table =
            loops.add_table([0, highest].map(|source| BlockPair { source, destination: 0 }));
        loops.add_nest((start, 0), 64, (block, 0), &[], table).unwrap();
        let mut body = vec![];
        gather::encode(&loops, &mut body);
        let (spans, bytes) = (body.len() as u32, loops.packed_bytes().unwrap());
        let header = Request { verb: Verb::Gather, spans, id: 1, bytes };
        let mut guest = greeted(&victim.transport);
        guest.ask(&[&header.encode()[..], &body].concat());
        let _ = guest.stream().shutdown(Shutdown::Write);
        let answered = guest.hear().unwrap();
        assert_eq!(guest.hear().map(|more| more.0), None);
        answered
    };
    let open = victim.base() + page;
    let (answer, bytes) = ask(open, 128, 3);
    assert_eq!((answer.verdict, bytes), (Verdict::Done, vec![OPEN; 128]));
    for (start, block, highest) in [
        (open - 1, 128, 3),
        (open, page, 1),
        (open, u64::from(u32::MAX), 1),
        (open + page - 63, 0, 0),
        (8, 1, 1),
    ] {
        let (answer, _) = ask(start, block, highest);
        assert_eq!(answer.verdict, Verdict::Outside, "{start:#x}, {block}, {highest}");
    }
    assert!(victim.is_unharmed());
}
