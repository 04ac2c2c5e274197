//! Dropping a transport gives everything back.

use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_transport::{ByteCopy, Transport};

use crate::back_end::BackEnd;
use crate::census::{self, Census};
use crate::memory::Memory;
use crate::pair::{MIB, PEER_SEED, done, soon};
use crate::peer::Peer;

/// An agent of NIXL takes a tenth of a second, and ten times that where the machine is busy.
const CYCLES: usize = 50;

pub(super) fn nothing_leaks<B: BackEnd>() {
    let mut process = Peer::start::<B>(MIB, PEER_SEED);
    let cycle = || {
        let ours = B::Memory::new(MIB);
        let transport = B::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        let region = unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: MIB as u64 };
        let operation = transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap();
        done(&operation);
        transport.deregister(region, soon()).unwrap();
        drop(transport);
    };
    // The first cycles load libraries and warm the allocator up.
    for _ in 0..20 {
        cycle();
    }
    let before = census::take();
    let peer_before = process.ask("census");
    let cycle = || {
        let ours = B::Memory::new(MIB);
        let transport = B::new().unwrap();
        // SAFETY: as above.
        unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: MIB as u64 };
        done(&transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap());
        // Everything is dropped at once, in no good order.
        drop(transport);
    };
    for _ in 0..CYCLES {
        cycle();
    }
    comes_back("ours", before, census::take);
    comes_back("the peer's", parse(&peer_before), || parse(&process.ask("census")));
}

/// Waits until no more is held than before.
pub(super) fn comes_back(whose: &str, before: Census, mut take: impl FnMut() -> Census) {
    let until = soon();
    loop {
        let after = take();
        if fits(before, after) {
            return;
        }
        assert!(Instant::now() < until, "{whose}: before {before:?}, after {after:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Threads and descriptors exactly; mappings up to what the allocator keeps for a later use, which is
/// some for every two threads that happened to run at once, and less than one for every other cycle.
fn fits(before: Census, after: Census) -> bool {
    after.threads <= before.threads
        && after.descriptors <= before.descriptors
        && after.mappings <= before.mappings + CYCLES / 2
}

fn parse(census: &str) -> Census {
    let numbers: Vec<usize> = census.split(' ').map(|n| n.parse().unwrap()).collect();
    Census { threads: numbers[0], descriptors: numbers[1], mappings: numbers[2] }
}
