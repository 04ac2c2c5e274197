//! Registered memory, and nothing else.

use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{ByteCopy, Error, Operation, Place, Side, Transport};

use crate::back_end::BackEnd;
use crate::data::{hash, pattern};
use crate::memory::Memory;
use crate::pair::{MIB, PEER_SEED, Pair, done, refused, soon};
use crate::peer::wait_until;

pub(super) fn outside_is_refused<B: BackEnd>() {
    let bytes = MIB;
    let mut pair = Pair::<B>::new(bytes);
    let peer = pair.process.base;
    let ours = pair.ours.base();
    let good = 1000;
    // Spans that leave a region of this base.
    let spans = |base: u64| {
        let end = base + bytes as u64;
        [
            (base - 1, 1),
            (base - 1, 2),
            (base - 4096, 8192),
            (end, 1),
            (end - 1, 2),
            (end - 10, 1 << 40),
            (base, bytes as u64 + 1),
            (base, u64::MAX),
            (base, u64::MAX - base + 2),
            (u64::MAX, 2),
            (0, 1),
            (0, 4096),
        ]
    };
    for (address, length) in spans(peer) {
        let inward =
            ByteCopy { source: address, destination: ours, bytes: length.min(bytes as u64) };
        if length > bytes as u64 {
            // Too long for our own side as well, whatever the peer says.
            if address.checked_add(length).is_some() && ours.checked_add(length).is_some() {
                let whole = one_by_one(&[ByteCopy { bytes: length, ..inward }]);
                refused(pair.transport.read(&pair.peer, &whole, soon()));
            }
            continue;
        }
        if address.checked_add(length).is_none() {
            // There are no loops that leave the address space.
            continue;
        }
        // Among good ones, so that the good ones do not hide it.
        let list = [pair.inward(0, 0, good), inward, pair.inward(good, good, good)];
        let error = refused(pair.transport.read(&pair.peer, &one_by_one(&list), soon()));
        assert!(
            matches!(error, Error::OutsideRegion { side: Side::Peer, .. }),
            "{address:#x}+{length}: {error}"
        );
    }
    for (address, length) in spans(ours) {
        if address.checked_add(length).is_none() || peer.checked_add(length).is_none() {
            continue;
        }
        let inward = one_by_one(&[ByteCopy { source: peer, destination: address, bytes: length }]);
        let error = refused(pair.transport.read(&pair.peer, &inward, soon()));
        assert!(matches!(error, Error::OutsideRegion { .. }), "{error}");
    }
    assert_eq!(pair.process.hash(), hash(&pattern(PEER_SEED, bytes)));
    // And nobody is the worse for it.
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, bytes));
}

pub(super) fn deregistered_is_outside<B: BackEnd>() {
    let mut pair = Pair::<B>::new(MIB);
    done(&pair.read_all());
    if B::SEES_DEREGISTRATION {
        assert_eq!(pair.process.ask("deregister"), "Ok(())");
        let copies = [pair.inward(0, 0, 4096)];
        let error = refused(pair.transport.read(&pair.peer, &one_by_one(&copies), soon()));
        assert!(matches!(error, Error::OutsideRegion { side: Side::Peer, .. }), "{error}");
        assert_eq!(pair.process.ask("register"), "ok");
        // The description is the same, and connecting again brings the regions up to date.
        let again = pair.transport.connect(&pair.process.description, soon()).unwrap();
        pair.peer = again;
        done(&pair.read_all());
    }
    // Our own side, for all: a region that was never registered, or is not any more.
    let other = B::Memory::new(MIB);
    let copy = ByteCopy { source: pair.process.base, destination: other.base(), bytes: 4096 };
    // SAFETY: the memory outlives the registration, and is only touched through its address.
    let id = unsafe { pair.transport.register(other.region()) }.unwrap();
    done(&pair.read(&[copy]));
    pair.transport.deregister(id, soon()).unwrap();
    let error = refused(pair.transport.read(&pair.peer, &one_by_one(&[copy]), soon()));
    assert!(matches!(error, Error::OutsideRegion { side: Side::Local, .. }), "{error}");
    assert_eq!(pair.transport.deregister(id, soon()), Err(Error::NoSuchRegion));
}

pub(super) fn a_region_in_use_is_busy<B: BackEnd>() {
    if !B::NEEDS_THE_PEER {
        // Nothing can be held up half-way there: the deadline tests say why.
        return;
    }
    let pair = Pair::<B>::new(32 * MIB);
    let other = B::Memory::new(32 * MIB);
    // SAFETY: the memory outlives the transport (declared first, dropped last) and is only touched
    // through its address.
    let id = unsafe { pair.transport.register(other.region()) }.unwrap();
    pair.process.stop();
    let copy =
        ByteCopy { source: pair.process.base, destination: other.base(), bytes: 32 * MIB as u64 };
    let operation = pair.read(&[copy]);
    let error = pair.transport.deregister(id, Instant::now());
    assert_eq!(error, Err(Error::RegionBusy));
    drop(operation);
    if !B::SETTLES_ALONE {
        // A handle that is dropped does not let go of the region before it is safe: of a read that has
        // been sent, as long as the peer stands still.
        wait_until("a read has been sent", || {
            let operation = pair.read(&[copy]);
            std::thread::sleep(Duration::from_millis(50));
            operation.cancel();
            wait_until("the outcome is known", || operation.poll().outcome().is_some());
            !operation.poll().is_safe()
        });
        assert_eq!(pair.transport.deregister(id, Instant::now()), Err(Error::RegionBusy));
    }
    pair.process.resume();
    pair.transport.deregister(id, soon()).unwrap();
    drop(pair);
}

pub(super) fn bad_descriptions_are_refused<B: BackEnd>() {
    let pair = Pair::<B>::new(MIB);
    let good = &pair.process.description;
    let mut bad: Vec<Vec<u8>> = (0..good.len().min(80)).map(|n| good[..n].to_vec()).collect();
    bad.push([&good[..], b"more"].concat());
    bad.push(pattern(4, 100));
    let mut other = good.clone();
    other[3] ^= 0xff;
    bad.push(other);
    for description in bad {
        let result = pair.transport.connect(&description, soon());
        assert!(matches!(result, Err(Error::BadDescription(_))), "{result:?}");
    }
    done(&pair.read_all());
}

pub(super) fn gpu_memory_is_not_mistaken_for_host_memory<B: BackEnd>() {
    let transport = B::new().unwrap();
    let memory = HostMemory::new(MIB).unwrap();
    let mut region = memory.region();
    region.place = Place::Gpu(0);
    // SAFETY: the memory outlives the transport. Either it is refused, or nobody is told of it.
    let result = unsafe { transport.register(region) };
    match result {
        Err(Error::Unsupported(_)) => {}
        // NIXL takes an address for what it is said to be, where there is no GPU to ask; so do kernels.
        Ok(_) => assert!(["nixl", "tcp-"].iter().any(|taken| B::NAME.starts_with(taken))),
        Err(other) => panic!("{other}"),
    }
    drop(transport);
}
