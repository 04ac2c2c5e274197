//! Every byte of every copy, and no other.

use std::time::Instant;

use kvferry_testkit::one_by_one;
use kvferry_testkit::random::Dice;
use kvferry_transport::{ByteCopy, Operation, Status, Transport};

use crate::back_end::BackEnd;
use crate::data::{hash, pattern};
use crate::memory::Memory;
use crate::pair::{MIB, OUR_SEED, PEER_SEED, Pair, Plan, carry_out, done, rounds, scatter, soon};

pub(super) fn random_lists_are_exact<B: BackEnd>() {
    let bytes = 3 * MIB + 4321;
    let mut pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut dice = Dice::new(77);
    for round in 0..rounds(20) {
        let copies = [1, 2, 3, 17, 300, 1023, 1024, 1025, 5000][round % 9];
        let plan = scatter(&mut dice, bytes, copies);
        check(&mut pair, &plan, &theirs, &mut ours);
    }
}

pub(super) fn large_copies_are_exact<B: BackEnd>() {
    let bytes = 65 * MIB;
    let mut pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    // One of 64 MiB, unaligned, and one of a single byte.
    let plan = vec![(12_345, 678, 64 * MIB), (7, 64 * MIB + 99_999, 1)];
    check(&mut pair, &plan, &theirs, &mut ours);
}

pub(super) fn many_copies_are_exact<B: BackEnd>() {
    let bytes = 6_500_000;
    let mut pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut dice = Dice::new(5);
    let plan = scatter(&mut dice, bytes, 100_000);
    check(&mut pair, &plan, &theirs, &mut ours);
    // The blocks of a pool: equal pieces on a grid, in another order.
    let cell = 64;
    let plan: Plan =
        (0..100_000).map(|i| ((i * 77_777 % 100_000) * cell, i * cell, cell)).collect();
    check(&mut pair, &plan, &theirs, &mut ours);
}

pub(super) fn many_operations_at_once<B: BackEnd>() {
    let bytes = 8 * MIB;
    let pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut dice = Dice::new(9);
    let slice = bytes / 64;
    let operations: Vec<_> = (0..64)
        .map(|i| {
            let mut plan = scatter(&mut dice, slice, 1 + i * 13);
            for (_, to, _) in &mut plan {
                *to += i * slice;
            }
            carry_out(&plan, &theirs, &mut ours);
            let copies: Vec<ByteCopy> =
                plan.iter().map(|&(f, t, n)| pair.inward(f, t, n)).collect();
            pair.read(&copies)
        })
        .collect();
    for operation in &operations {
        done(operation);
    }
    assert!(pair.ours.snapshot() == ours, "reads at once are not exact");
}

pub(super) fn an_empty_list_is_done<B: BackEnd>() {
    let pair = Pair::<B>::new(MIB);
    let copies = [pair.inward(5, 5, 0)];
    for copies in [&[][..], &copies] {
        let operation = pair.transport.read(&pair.peer, &one_by_one(copies), soon()).unwrap();
        done(&operation);
    }
    assert!(pair.ours.snapshot() == pattern(OUR_SEED, MIB));
}

pub(super) fn reports_add_up<B: BackEnd>() {
    let pair = Pair::<B>::new(MIB);
    let statistics = pair.transport.statistics();
    assert_eq!((statistics.started, statistics.bytes), (0, 0));
    // Three that touch, and one apart.
    let copies = [
        pair.inward(0, 0, 100),
        pair.inward(100, 100, 50),
        pair.inward(150, 150, 1),
        pair.inward(300, 200, 7),
    ];
    let operation = pair.read(&copies);
    let Status::Done(report) = operation.wait(soon()) else {
        panic!("{operation:?}");
    };
    let posted = if B::AS_ONE { 1 } else { 2 };
    assert_eq!((report.bytes, report.copies, report.copies_posted), (158, 4, posted));
    assert!(report.rate().is_some());
    let failed =
        pair.transport.read(&pair.peer, &one_by_one(&[pair.inward(0, 0, 10)]), Instant::now());
    let failed = failed.map(|operation| operation.wait(soon()));
    let failures = u64::from(!matches!(failed, Ok(Status::Done(_))));
    let statistics = pair.transport.statistics();
    assert_eq!(statistics.started, 2);
    assert_eq!((statistics.done, statistics.failed), (2 - failures, failures));
    assert_eq!(statistics.bytes, 158 + 10 * (1 - failures));
    assert_eq!(statistics.quarantined, 0);
}

/// Carries a plan out, and compares all memory of both sides with a model.
fn check<B: BackEnd>(pair: &mut Pair<B>, plan: &Plan, theirs: &[u8], ours: &mut [u8]) {
    let copies: Vec<ByteCopy> = plan.iter().map(|&(f, t, n)| pair.inward(f, t, n)).collect();
    done(&pair.read(&copies));
    carry_out(plan, theirs, ours);
    assert!(pair.ours.snapshot() == *ours, "a read is not exact");
    assert_eq!(pair.process.hash(), hash(theirs), "a read changed its source");
}
