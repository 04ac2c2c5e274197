//! Peers that die, restart and are left.

use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_transport::{Error, Operation, Status, Transport};

use crate::back_end::BackEnd;
use crate::data::pattern;
use crate::memory::Memory;
use crate::pair::{MIB, PEER_SEED, Pair, done, refused, rounds, soon};
use crate::peer::{Peer, wait_until};

pub(super) fn a_killed_peer_is_an_error<B: BackEnd>() {
    for round in 0..rounds(3) {
        // A fast card may have done all of them before the kill: then there are more of them.
        let mut operations = 30;
        while !a_killed_peer_matters::<B>(round, operations) {
            operations *= 4;
            assert!(operations < 10_000, "the peer was killed too late to matter");
        }
    }
}

/// Kills a peer while so many reads are under way; whether that was in time to make one of them fail.
fn a_killed_peer_matters<B: BackEnd>(round: usize, operations: usize) -> bool {
    let bytes = 64 * MIB;
    let pair = Pair::<B>::new(bytes);
    let before = pair.ours.byte(0);
    let deadline = Instant::now() + Duration::from_secs(30);
    let operations: Vec<_> = (0..operations)
        .map(|_| {
            let copies = one_by_one(&[pair.inward(0, 0, bytes)]);
            pair.transport.read(&pair.peer, &copies, deadline).unwrap()
        })
        .collect();
    if round > 0 {
        wait_until("bytes move", || pair.ours.byte(0) != before);
    }
    pair.process.kill();
    if B::OUTLIVES_THE_PEER {
        // Nothing is lost, and what is read is what was there.
        operations.iter().for_each(done);
        assert!(pair.ours.snapshot() == pattern(PEER_SEED, bytes));
        return true;
    }
    let mut failed = 0;
    for operation in &operations {
        let status = operation.wait(deadline);
        match status {
            Status::Done(_) => {}
            Status::Failed(Error::PeerLost(_)) => failed += 1,
            other => panic!("a killed peer gave {other:?}"),
        }
    }
    if failed == 0 {
        return false;
    }
    let copies = one_by_one(&[pair.inward(0, 0, 10)]);
    let error = refused(pair.transport.read(&pair.peer, &copies, deadline));
    assert!(matches!(error, Error::PeerLost(_)), "{error}");
    true
}

pub(super) fn a_restarted_peer_is_reachable<B: BackEnd>() {
    let bytes = MIB;
    let mut pair = Pair::<B>::new(bytes);
    for seed in 10..13 {
        done(&pair.read_all());
        pair.process.kill();
        pair.process = Peer::start::<B>(bytes, seed);
        // The old peer is not mistaken for the new one.
        let copies = one_by_one(&[pair.inward(0, 0, 4096)]);
        let deadline = Instant::now() + Duration::from_secs(20);
        let old = pair.transport.read(&pair.peer, &copies, deadline);
        match old {
            // The new one may have its memory at the same address: what is read is the old one's.
            Ok(old) if B::OUTLIVES_THE_PEER => {
                done(&old);
                let before = if seed == 10 { PEER_SEED } else { seed - 1 };
                assert!(pair.ours.snapshot() == pattern(before, bytes), "other memory was read");
            }
            old => {
                let error = refused(old);
                assert!(
                    matches!(error, Error::PeerLost(_) | Error::OutsideRegion { .. }),
                    "{error}"
                );
            }
        }
        if seed == 11 {
            pair.transport.disconnect(&pair.peer);
        }
        let peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
        pair.peer = peer;
        done(&pair.read_all());
        assert!(pair.ours.snapshot() == pattern(seed, bytes));
    }
}

/// A peer that has registered other memory, wherever that lies, and is connected to again: what is read is what
/// it has now.
pub(super) fn a_peer_with_other_memory_is_read_anew<B: BackEnd>() {
    let bytes = MIB;
    let mut pair = Pair::<B>::new(bytes);
    let (first, mut same) = (pair.process.base, 0);
    for seed in 10..20 {
        done(&pair.read_all());
        pair.process.exchange(seed);
        same += u64::from(pair.process.base == first);
        pair.peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
        done(&pair.read_all());
        assert!(pair.ours.snapshot() == pattern(seed, bytes), "the memory before was read");
    }
    assert!(!B::NAME.ends_with("-twin") || same > 0, "no address was given out again");
}

pub(super) fn disconnecting_ends_operations<B: BackEnd>() {
    let pair = Pair::<B>::new(64 * MIB);
    let operations: Vec<_> = (0..10).map(|_| pair.read_all()).collect();
    pair.transport.disconnect(&pair.peer);
    for operation in &operations {
        let status = operation.wait(soon());
        assert!(
            matches!(status, Status::Done(_) | Status::Failed(Error::Disconnected)),
            "{status:?}"
        );
    }
    let error =
        refused(pair.transport.read(&pair.peer, &one_by_one(&[pair.inward(0, 0, 10)]), soon()));
    assert_eq!(error, Error::Disconnected);
    // A second time does no harm, and one may connect again.
    pair.transport.disconnect(&pair.peer);
    let peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
    let copies = one_by_one(&[pair.inward(0, 0, 64 * MIB)]);
    done(&pair.transport.read(&peer, &copies, soon()).unwrap());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, pair.bytes));
}
