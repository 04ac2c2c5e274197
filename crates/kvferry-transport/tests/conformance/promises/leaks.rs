//! Dropping a transport gives everything back.

use kvferry_transport::{ByteCopy, Transport};

use crate::back_end::BackEnd;
use crate::census::{self, Census};
use crate::memory::Memory;
use crate::pair::{MIB, PEER_SEED, done, soon};
use crate::peer::{Peer, wait_until};

pub(super) fn nothing_leaks<B: BackEnd>() {
    let mut process = Peer::start::<B>(MIB, PEER_SEED);
    let cycle = || {
        let ours = B::Memory::new(MIB);
        let transport = B::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        let region = unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: MIB as u64 };
        let operation = transport.read(&peer, &[copy], soon()).unwrap();
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
        done(&transport.read(&peer, &[copy], soon()).unwrap());
        // Everything is dropped at once, in no good order.
        drop(transport);
    };
    for _ in 0..100 {
        cycle();
    }
    let mut after = census::take();
    wait_until("the census is as before", || {
        after = census::take();
        fits(before, after)
    });
    wait_until("the peer's census is as before", || {
        let after = process.ask("census");
        fits(parse(&peer_before), parse(&after))
    });
}

/// Threads and descriptors exactly; mappings up to what the allocator keeps for a later use.
fn fits(before: Census, after: Census) -> bool {
    after.threads <= before.threads
        && after.descriptors <= before.descriptors
        && after.mappings <= before.mappings + 8
}

fn parse(census: &str) -> Census {
    let numbers: Vec<usize> = census.split(' ').map(|n| n.parse().unwrap()).collect();
    Census { threads: numbers[0], descriptors: numbers[1], mappings: numbers[2] }
}
