//! Two transports of one process that pack for each other. What takes processes of their own is in the conformance
//! suite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Loops};

use super::packing;
use super::peer::Description;
use super::{Nixl, NixlOptions, NixlPeer, VARIABLE, install};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::staging::{Use, Waiting};
use kvferry_transport::tcp::gather;
use kvferry_transport::{Operation, Report, Status, Transport};

const BYTES: usize = 4 << 20;

/// A transport and the memory that it serves, of which every byte is the same.
struct End {
    transport: Nixl,
    memory: HostMemory,
}

impl End {
    fn new(fill: u8, slots: u64) -> Self {
        if std::env::var_os(VARIABLE).is_none() {
            install(None).unwrap();
        }
        let memory = HostMemory::new(3 * BYTES).unwrap();
        memory.write(0, &vec![fill; 3 * BYTES]);
        let options = NixlOptions { staging: slots * gather::SLOT_BYTES, ..NixlOptions::default() };
        let end = Self { transport: Nixl::new(&options).unwrap(), memory };
        // SAFETY: the transport is dropped before the memory, in the order of the fields; the
        // memory is only touched through its address.
        unsafe { end.transport.register(end.memory.region()) }.unwrap();
        end
    }

    fn connect(&self, to: &Self) -> NixlPeer {
        self.transport.connect(&to.transport.describe().unwrap(), soon()).unwrap()
    }

    /// Starts to read the first third of what another has, in runs of 512 bytes, into every other 512 bytes of the rest.
    fn post(&self, peer: &NixlPeer, from: &Self) -> Transfer {
        let mut loops = Loops::default();
        let blocks = (BYTES >> 14) as u32;
        let pairs = (0..blocks).map(|at| BlockPair { source: at, destination: at });
        let table = loops.add_table(pairs);
        let runs = Loop { count: 32, source: 512, destination: 1024 };
        let start = (from.memory.base(), self.memory.base() + BYTES as u64);
        loops.add_nest(start, 512, (16 << 10, 32 << 10), &[runs], table).unwrap();
        self.transport.read_packed(peer, &loops, soon()).unwrap()
    }

    fn read(&self, peer: &NixlPeer, from: &Self) -> Report {
        done(&self.post(peer, from))
    }

    /// Whether all of that has arrived, and nothing else.
    fn has_read(&self, theirs: u8, ours: u8) -> bool {
        let fill = |at: usize| if at >= BYTES && at % 1024 < 512 { theirs } else { ours };
        self.memory.snapshot().into_iter().enumerate().all(|(at, byte)| byte == fill(at))
    }
}

fn done(operation: &Transfer) -> Report {
    match operation.wait(soon()) {
        Status::Done(report) => report,
        other => panic!("{other:?}"),
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let until = soon();
    while !happened() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A peer that was read packed is let go of with its connections, their threads, and what they fetch by.
#[test]
fn a_peer_that_packs_goes_when_it_is_disconnected() {
    let (source, reader) = (End::new(7, 40), End::new(1, 40));
    let peer = reader.connect(&source);
    let report = reader.read(&peer, &source);
    assert_eq!(report.packed, report.bytes, "{report:?}");
    let inner = Arc::downgrade(&peer.0);
    reader.transport.disconnect(&peer);
    drop(peer);
    wait_until("the peer is gone", || inner.strong_count() == 0);
    // What fetches for the lanes has the only ones.
    assert_eq!(Arc::weak_count(&reader.transport.state), 0, "a lane is left");
}

/// A peer that is disconnected while it is asked whether it packs.
#[test]
fn nothing_stays_of_a_peer_that_is_disconnected_while_it_is_met() {
    let (source, reader) = (End::new(7, 40), End::new(1, 40));
    let description = source.transport.describe().unwrap();
    let peer = reader.transport.connect(&description, soon()).unwrap();
    let told = Description::parse(&description).unwrap().told.unwrap();
    // As `connect` does it, and as slowly as it may.
    let late = packing::meet(&reader.transport.state, &peer, &told, soon()).unwrap();
    let client = Arc::downgrade(&late.client);
    reader.transport.disconnect(&peer);
    peer.adopt(late);
    assert_eq!(client.strong_count(), 0, "a client of a peer that is gone");
    assert!(peer.packer(false).is_none());
    assert_eq!(Arc::weak_count(&reader.transport.state), 0, "a lane is left");
}

/// A peer all of whose memory to pack into is in use when it is met packs all the same, when some is free.
#[test]
fn a_peer_that_was_busy_when_it_was_met_packs() {
    let (source, reader) = (End::new(7, 4), End::new(1, 40));
    let staging = &source.transport.state.areas.of(kvferry_layout::Place::Host).unwrap().staging;
    let all: Vec<_> = (0..4)
        .map(|_| staging.take_now(Use::Peer, &mut Waiting::new(Duration::ZERO)).unwrap().unwrap())
        .collect();
    let peer = reader.connect(&source);
    drop(all);
    assert!(reader.transport.packs_below(&peer) > 0);
    let report = reader.read(&peer, &source);
    assert_eq!(report.packed, report.bytes, "{report:?}");
}

/// Two that read from each other, with far fewer slots than both could use, for their own reads and for those of the
/// other: nobody waits in a circle, and nothing is read run by run because others were slower than expected.
#[test]
fn who_reads_from_each_other_waits_for_slots_and_packs_all() {
    for slots in [2, 3] {
        let (one, other) = (End::new(7, slots), End::new(1, slots));
        let peers = (one.connect(&other), other.connect(&one));
        let read = |_| [one.post(&peers.0, &other), other.post(&peers.1, &one)];
        let operations: Vec<Transfer> = (0..6).flat_map(read).collect();
        for operation in &operations {
            let report = done(operation);
            assert_eq!(report.packed, report.bytes, "{slots} slots: {report:?}");
        }
        assert!(one.has_read(1, 7) && other.has_read(7, 1), "{slots} slots");
        for end in [&one, &other] {
            wait_until("the slots are back", || end.transport.staging().in_use == 0);
            assert_eq!(end.transport.staging().refused, 0);
        }
    }
}
