//! Deadlines, cancellation and quarantine: nothing lands late.

use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_transport::{ByteCopy, Error, Operation, Status, Transport};

use crate::back_end::BackEnd;
use crate::data::{hash, pattern};
use crate::memory::Memory;
use crate::pair::{MIB, PEER_SEED, Pair, done, rounds, soon};
use crate::peer::wait_until;

pub(super) fn deadlines_hold<B: BackEnd>() {
    let pair = Pair::<B>::new(64 * MIB);
    // Already past: nothing that ends well may be reported.
    let copies = one_by_one(&[pair.inward(0, 0, 64 * MIB)]);
    let past = pair.transport.read(&pair.peer, &copies, Instant::now()).unwrap();
    let status = past.wait(soon());
    assert!(
        matches!(status, Status::Failed(Error::DeadlinePassed) | Status::Done(_)),
        "{status:?}"
    );
    // A peer that is stopped keeps silent; the deadline comes all the same.
    pair.process.stop();
    let deadline = Instant::now() + Duration::from_millis(400);
    let operation = pair.transport.read(&pair.peer, &copies, deadline).unwrap();
    wait_until("the deadline held", || operation.poll().outcome().is_some());
    let status = operation.poll();
    match status.outcome().unwrap() {
        Err(error) => {
            assert_eq!(*error, Error::DeadlinePassed);
            assert!(Instant::now() >= deadline);
        }
        Ok(_) => assert!(!B::NEEDS_THE_PEER, "{status:?}"),
    }
    // Nobody has to poll for it: the transport itself notices.
    let before = pair.transport.statistics();
    let unpolled = pair.transport.read(&pair.peer, &copies, deadline).unwrap();
    wait_until("the transport noticed", || {
        let now = pair.transport.statistics();
        now.failed + now.done > before.failed + before.done
    });
    let status = unpolled.poll();
    match status.outcome().unwrap() {
        Err(error) => assert_eq!(*error, Error::DeadlinePassed),
        Ok(_) => assert!(!B::NEEDS_THE_PEER, "{status:?}"),
    }
    drop(unpolled);
    // And when the peer goes on, everything works again.
    pair.process.resume();
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, pair.bytes));
    drop(operation);
}

pub(super) fn cancelled_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Cancel);
}

pub(super) fn timed_out_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Deadline);
}

pub(super) fn disconnected_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Disconnect);
}

/// How reads end before their time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Cancel,
    Deadline,
    Disconnect,
}

/// Starts reads, stops the peer while they run, and ends them. When they are safe, marks the
/// destination, lets the peer go on, and sees that the mark stays.
fn reads_never_land_late<B: BackEnd>(end: End) {
    let bytes = 64 * MIB;
    let mut pair = Pair::<B>::new(bytes);
    let mut saw_quarantine = false;
    let mut ended_early = 0;
    for round in 0..rounds(4) {
        pair.ours.write(0, &vec![0xee; bytes]);
        // Pieces apart, so that they are not merged into one.
        let copies: Vec<ByteCopy> =
            (0..128).map(|i| pair.inward(i * 512 * 1024, i * 512 * 1024, 500 * 1024)).collect();
        let until = match end {
            End::Deadline => Instant::now() + Duration::from_millis(300),
            End::Cancel | End::Disconnect => soon(),
        };
        let operation = pair.transport.read(&pair.peer, &one_by_one(&copies), until).unwrap();
        if round % 2 == 0 {
            // In mid-transfer: when the first byte has come.
            wait_until("bytes arrive", || {
                (0..128).any(|i| pair.ours.byte(i * 512 * 1024) != 0xee)
                    || operation.poll() != Status::InProgress
            });
        }
        pair.process.stop();
        let error = match end {
            End::Cancel => {
                operation.cancel();
                Error::Cancelled
            }
            End::Deadline => Error::DeadlinePassed,
            End::Disconnect => {
                pair.transport.disconnect(&pair.peer);
                Error::Disconnected
            }
        };
        wait_until("the outcome is known", || operation.poll().outcome().is_some());
        // Long enough for what can settle without the peer, however busy this machine is.
        let patience = Duration::from_millis(if B::SETTLES_ALONE { 30_000 } else { 500 });
        let status = operation.wait(Instant::now() + patience);
        if matches!(status, Status::Quarantined(_)) {
            assert!(!B::SETTLES_ALONE, "{status:?}");
            assert!(!status.is_safe());
            assert_eq!(pair.transport.statistics().quarantined, 1);
            saw_quarantine = true;
            pair.process.resume();
        }
        let status = operation.wait(soon());
        match &status {
            Status::Failed(why) => assert_eq!(*why, error),
            Status::Done(_) => ended_early += 1,
            other => panic!("never safe: {other:?}"),
        }
        assert!(status.is_safe());
        // The destination is ours again, as the transport says.
        let mark = vec![0xaa; bytes];
        pair.ours.write(0, &mark);
        pair.process.resume();
        std::thread::sleep(Duration::from_millis(400));
        assert!(
            pair.ours.snapshot() == mark,
            "bytes landed after the destination was declared safe"
        );
        assert_eq!(pair.transport.statistics().quarantined, 0);
        let description = &pair.process.description;
        pair.peer = pair.transport.connect(description, soon()).unwrap();
    }
    if B::NEEDS_THE_PEER {
        assert!(ended_early < rounds(4), "no read was caught in mid-transfer");
        assert_eq!(saw_quarantine, !B::SETTLES_ALONE);
    }
    // And the transport is as good as new.
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, bytes));
}

/// Reads that go on, beside many that are cancelled.
pub(super) fn cancelling_one_disturbs_no_other<B: BackEnd>() {
    let bytes = 64 * MIB;
    let mut pair = Pair::<B>::new(2 * bytes);
    let theirs = pattern(PEER_SEED, 2 * bytes);
    let half = bytes / 2;
    let first = pair.read(&[pair.inward(0, 0, bytes)]);
    let second = pair.read(&[pair.inward(bytes, bytes, half)]);
    let cancelled: Vec<_> = (0..40)
        .map(|i| {
            let operation = pair.read(&[pair.inward(0, bytes + half, half)]);
            if i % 2 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            operation.cancel();
            operation
        })
        .collect();
    done(&first);
    done(&second);
    for operation in &cancelled {
        assert!(operation.wait(soon()).is_safe());
    }
    assert!(
        pair.ours.snapshot()[..bytes + half] == theirs[..bytes + half],
        "a read beside cancelled ones is not exact"
    );
    assert_eq!(pair.process.hash(), hash(&theirs), "a read changed its source");
}

pub(super) fn dropped_transports_never_land_late<B: BackEnd>() {
    let bytes = 64 * MIB;
    let pair = Pair::<B>::new(bytes);
    let Pair { transport, peer, process, ours, .. } = pair;
    process.stop();
    let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: bytes as u64 };
    let operation = transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap();
    drop(peer);
    drop(transport);
    let status = operation.poll();
    assert!(status.is_safe(), "{status:?}");
    let mark = vec![0xaa; bytes];
    ours.write(0, &mark);
    process.resume();
    std::thread::sleep(Duration::from_millis(700));
    assert!(ours.snapshot() == mark, "bytes landed after the transport was dropped");
}

pub(super) fn posting_does_not_wait<B: BackEnd>() {
    let pair = Pair::<B>::new(128 * MIB);
    // Bytes that take tens of milliseconds are not there yet when the call is back. A machine that
    // stops us in between can hide that once, but not every time.
    let caught = (0..20).any(|_| {
        let operations: Vec<_> = (0..4).map(|_| pair.read_all()).collect();
        let early =
            operations.iter().filter(|operation| operation.poll() == Status::InProgress).count();
        operations.iter().for_each(done);
        early >= 3
    });
    assert!(caught, "reads were over when the calls returned");
}
