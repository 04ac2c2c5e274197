//! The tests. Each holds every back end to one promise of `Transport`.

use std::time::{Duration, Instant};

use kvferry_transport::local::{Local, LocalOptions, Route};
use kvferry_transport::nixl::{Nixl, NixlOptions, capi, find};
use kvferry_transport::{ByteCopy, Error, Operation, Place, Side, Status, Transport};

use crate::back_end::{BackEnd, LocalEnd, NixlTcpEnd};
use crate::census::{self, Census};
use crate::memory::{Memory, Random, hash, pattern};
use crate::peer::{Peer, from_hex, to_hex, wait_until};

pub(crate) type Promise = (&'static str, fn());

/// What all back ends promise.
pub(crate) fn all<B: BackEnd>() -> Vec<Promise> {
    vec![
        ("random_lists_are_exact", random_lists_are_exact::<B>),
        ("large_copies_are_exact", large_copies_are_exact::<B>),
        ("many_copies_are_exact", many_copies_are_exact::<B>),
        ("many_operations_at_once", many_operations_at_once::<B>),
        ("an_empty_list_is_done", an_empty_list_is_done::<B>),
        ("notifications_after_data_and_once", notifications_after_data_and_once::<B>),
        ("outside_is_refused", outside_is_refused::<B>),
        ("deregistered_is_outside", deregistered_is_outside::<B>),
        ("a_region_in_use_is_busy", a_region_in_use_is_busy::<B>),
        ("deadlines_hold", deadlines_hold::<B>),
        ("cancelled_reads_never_land_late", cancelled_reads_never_land_late::<B>),
        ("timed_out_reads_never_land_late", timed_out_reads_never_land_late::<B>),
        ("disconnected_reads_never_land_late", disconnected_reads_never_land_late::<B>),
        ("cancelled_writes_never_land_late", cancelled_writes_never_land_late::<B>),
        ("cancelling_one_disturbs_no_other", cancelling_one_disturbs_no_other::<B>),
        ("dropped_transports_never_land_late", dropped_transports_never_land_late::<B>),
        ("a_killed_peer_is_an_error", a_killed_peer_is_an_error::<B>),
        ("a_restarted_peer_is_reachable", a_restarted_peer_is_reachable::<B>),
        ("disconnecting_ends_operations", disconnecting_ends_operations::<B>),
        ("posting_does_not_wait", posting_does_not_wait::<B>),
        ("bad_descriptions_are_refused", bad_descriptions_are_refused::<B>),
        ("reports_add_up", reports_add_up::<B>),
        ("gpu_memory_is_not_mistaken_for_host_memory", gpu_memory::<B>),
        ("nothing_leaks", nothing_leaks::<B>),
    ]
}

/// What only `local` promises.
pub(crate) fn for_local() -> Vec<Promise> {
    vec![("falls_back_to_tcp_and_says_so", falls_back_to_tcp_and_says_so)]
}

/// What only `nixl` promises, and why it keeps destinations in quarantine.
pub(crate) fn for_nixl_tcp() -> Vec<Promise> {
    vec![
        ("a_missing_plugin_is_named", a_missing_plugin_is_named),
        ("released_requests_of_nixl_land_late", released_requests_of_nixl_land_late),
    ]
}

const MIB: usize = 1 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn rounds(usual: usize) -> usize {
    if std::env::var_os(crate::LONG).is_some() { usual * 10 } else { usual }
}

/// Two processes: this one with a transport and memory of its own, and a connected peer.
///
/// Fields are dropped in this order: the transport before the memory.
struct Pair<B: BackEnd> {
    transport: B::Transport,
    peer: <B::Transport as Transport>::Peer,
    process: Peer,
    ours: Memory,
    bytes: usize,
}

const PEER_SEED: u64 = 1;
const OUR_SEED: u64 = 2;

impl<B: BackEnd> Pair<B> {
    fn new(bytes: usize) -> Self {
        let process = Peer::start::<B>(bytes, PEER_SEED);
        let ours = Memory::new(bytes);
        ours.set(&pattern(OUR_SEED, bytes));
        let transport = B::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        Self { transport, peer, process, ours, bytes }
    }

    /// A copy from the peer to us, by offsets.
    fn inward(&self, from: usize, to: usize, bytes: usize) -> ByteCopy {
        ByteCopy {
            source: self.process.base + from as u64,
            destination: self.ours.base() + to as u64,
            bytes: bytes as u64,
        }
    }

    /// A copy from us to the peer, by offsets.
    fn outward(&self, from: usize, to: usize, bytes: usize) -> ByteCopy {
        ByteCopy {
            source: self.ours.base() + from as u64,
            destination: self.process.base + to as u64,
            bytes: bytes as u64,
        }
    }

    fn read(&self, copies: &[ByteCopy]) -> <B::Transport as Transport>::Operation {
        self.transport.read(&self.peer, copies, None, soon()).unwrap()
    }

    /// Reads all of the peer's memory.
    fn read_all(&self) -> <B::Transport as Transport>::Operation {
        self.read(&[self.inward(0, 0, self.bytes)])
    }
}

fn done(operation: &impl Operation) {
    let status = operation.wait(soon());
    assert!(matches!(status, Status::Done(_)), "{status:?}");
}

/// How a list of copies is to be carried out, by offsets: from, to, bytes.
type Plan = Vec<(usize, usize, usize)>;

/// Random pieces whose destinations do not overlap.
fn scatter(random: &mut Random, bytes: usize, copies: usize) -> Plan {
    let cell = bytes / copies;
    let mut cells: Vec<usize> = (0..copies).collect();
    for i in (1..copies).rev() {
        cells.swap(i, random.below(i + 1));
    }
    cells
        .into_iter()
        .map(|at| {
            // Often a short piece, sometimes a whole cell, so that neighbours touch.
            let length = match random.below(4) {
                0 => cell,
                1 => 1 + random.below(cell.min(16)),
                _ => 1 + random.below(cell),
            };
            let to = at * cell + random.below(cell - length + 1);
            let from = match random.below(3) {
                0 => to,
                _ => random.below(bytes - length + 1),
            };
            (from, to, length)
        })
        .collect()
}

fn carry_out(plan: &Plan, source: &[u8], destination: &mut [u8]) {
    for &(from, to, bytes) in plan {
        destination[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
    }
}

/// Carries a plan out in both directions, and compares all memory of both sides with a model.
fn check<B: BackEnd>(pair: &mut Pair<B>, plan: &Plan, theirs: &mut [u8], ours: &mut [u8]) {
    let inward: Vec<ByteCopy> = plan.iter().map(|&(f, t, n)| pair.inward(f, t, n)).collect();
    done(&pair.read(&inward));
    carry_out(plan, theirs, ours);
    assert!(pair.ours.snapshot() == *ours, "a read is not exact");
    let outward: Vec<ByteCopy> = plan.iter().map(|&(f, t, n)| pair.outward(f, t, n)).collect();
    let written = pair.transport.write(&pair.peer, &outward, None, soon()).unwrap();
    done(&written);
    carry_out(plan, ours, theirs);
    assert_eq!(pair.process.hash(), hash(theirs), "a write is not exact");
    assert!(pair.ours.snapshot() == *ours, "a write changed its source");
}

fn random_lists_are_exact<B: BackEnd>() {
    let bytes = 3 * MIB + 4321;
    let mut pair = Pair::<B>::new(bytes);
    let mut theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut random = Random(77);
    for round in 0..rounds(20) {
        let copies = [1, 2, 3, 17, 300, 1023, 1024, 1025, 5000][round % 9];
        let plan = scatter(&mut random, bytes, copies);
        check(&mut pair, &plan, &mut theirs, &mut ours);
    }
}

fn large_copies_are_exact<B: BackEnd>() {
    let bytes = 65 * MIB;
    let mut pair = Pair::<B>::new(bytes);
    let mut theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    // One of 64 MiB, unaligned, and one of a single byte.
    let plan = vec![(12_345, 678, 64 * MIB), (7, 64 * MIB + 99_999, 1)];
    check(&mut pair, &plan, &mut theirs, &mut ours);
}

fn many_copies_are_exact<B: BackEnd>() {
    let bytes = 6_500_000;
    let mut pair = Pair::<B>::new(bytes);
    let mut theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut random = Random(5);
    let plan = scatter(&mut random, bytes, 100_000);
    check(&mut pair, &plan, &mut theirs, &mut ours);
    // The blocks of a pool: equal pieces on a grid, in another order.
    let cell = 64;
    let plan: Plan =
        (0..100_000).map(|i| ((i * 77_777 % 100_000) * cell, i * cell, cell)).collect();
    check(&mut pair, &plan, &mut theirs, &mut ours);
}

fn many_operations_at_once<B: BackEnd>() {
    let bytes = 8 * MIB;
    let pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    let mut random = Random(9);
    let slice = bytes / 64;
    let operations: Vec<_> = (0..64)
        .map(|i| {
            let mut plan = scatter(&mut random, slice, 1 + i * 13);
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

fn an_empty_list_is_done<B: BackEnd>() {
    let mut pair = Pair::<B>::new(MIB);
    let copies = [pair.inward(5, 5, 0)];
    for copies in [&[][..], &copies] {
        let operation = pair.transport.read(&pair.peer, copies, Some(b"nothing"), soon()).unwrap();
        done(&operation);
    }
    assert_eq!(pair.process.ask("await 2"), "nothing,nothing");
    assert!(pair.ours.snapshot() == pattern(OUR_SEED, MIB));
}

fn notifications_after_data_and_once<B: BackEnd>() {
    // Many small operations, and some that no back end carries out in one go: of 2,000 copies, or
    // of several MiB.
    let sizes: Vec<usize> =
        (0..100).map(|i| if i % 10 == 3 { 6_000_000 } else { 40_000 }).collect();
    let bytes = sizes.iter().sum();
    let slots = sizes.len();
    let mut pair = Pair::<B>::new(bytes);
    // Each write fills a slot of the peer's with a byte of its own, in pieces that do not touch,
    // and says so.
    let content: Vec<u8> =
        (0..slots).flat_map(|i| std::iter::repeat_n(i as u8, sizes[i])).collect();
    pair.ours.set(&content);
    assert_eq!(pair.process.ask("fill 3"), "ok");
    let mut messages = Vec::new();
    let mut base = 0;
    let operations: Vec<_> = (0..slots)
        .map(|i| {
            let slot = sizes[i];
            let piece = if i % 20 == 3 { slot / 2 } else { slot / 2000 };
            let copies: Vec<ByteCopy> = (0..slot / piece)
                .rev()
                .map(|number| base + number * piece)
                .map(|at| pair.outward(at, at, piece))
                .collect();
            let message = format!("{base}:{slot}:{i}");
            let operation = pair
                .transport
                .write(&pair.peer, &copies, Some(message.as_bytes()), soon())
                .unwrap();
            messages.push(format!("{message}=true"));
            base += slot;
            operation
        })
        .collect();
    let mut got: Vec<String> =
        pair.process.ask(&format!("await {slots}")).split(',').map(str::to_owned).collect();
    for operation in &operations {
        done(operation);
    }
    got.sort();
    messages.sort();
    assert_eq!(got, messages);
    // Reads notify too, whether their owner polls them or not.
    let unpolled: Vec<_> = (0..20)
        .map(|i| {
            let message = format!("read {i:02}");
            let copies = [pair.inward(i * 1000, i * 1000, 1000)];
            pair.transport.read(&pair.peer, &copies, Some(message.as_bytes()), soon()).unwrap()
        })
        .collect();
    let mut got: Vec<String> = pair.process.ask("await 20").split(',').map(str::to_owned).collect();
    got.sort();
    let all: Vec<String> = (0..20).map(|i| format!("read {i:02}")).collect();
    assert_eq!(got, all);
    drop(unpolled);
    let long = vec![b'x'; kvferry_transport::MAX_NOTIFICATION_BYTES + 1];
    let refused = pair.transport.read(&pair.peer, &[], Some(&long), soon());
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
}

/// The error of an operation that must be refused, by the call or later.
fn refused<O: Operation>(result: Result<O, Error>) -> Error {
    match result {
        Err(error) => error,
        Ok(operation) => match operation.wait(soon()) {
            Status::Failed(error) => error,
            other => panic!("was not refused: {other:?}"),
        },
    }
}

fn outside_is_refused<B: BackEnd>() {
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
        let outward =
            ByteCopy { source: ours, destination: address, bytes: length.min(bytes as u64) };
        if length > bytes as u64 {
            // Too long for our own side as well, whatever the peer says.
            let whole = ByteCopy { bytes: length, ..inward };
            refused(pair.transport.read(&pair.peer, &[whole], None, soon()));
            continue;
        }
        // Among good ones, so that the good ones do not hide it.
        let list = [pair.inward(0, 0, good), inward, pair.inward(good, good, good)];
        let error = refused(pair.transport.read(&pair.peer, &list, None, soon()));
        assert!(
            matches!(error, Error::OutsideRegion { side: Side::Peer, .. }),
            "{address:#x}+{length}: {error}"
        );
        let error = refused(pair.transport.write(&pair.peer, &[outward], None, soon()));
        assert!(
            matches!(error, Error::OutsideRegion { side: Side::Peer, .. }),
            "{address:#x}+{length}: {error}"
        );
    }
    for (address, length) in spans(ours) {
        let inward = ByteCopy { source: peer, destination: address, bytes: length };
        let outward = ByteCopy { source: address, destination: peer, bytes: length };
        for result in [
            pair.transport.read(&pair.peer, &[inward], None, soon()),
            pair.transport.write(&pair.peer, &[outward], None, soon()),
        ] {
            let error = refused(result);
            assert!(matches!(error, Error::OutsideRegion { .. }), "{error}");
        }
    }
    assert_eq!(pair.process.hash(), hash(&pattern(PEER_SEED, bytes)));
    // And nobody is the worse for it.
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, bytes));
}

fn deregistered_is_outside<B: BackEnd>() {
    let mut pair = Pair::<B>::new(MIB);
    done(&pair.read_all());
    if B::SEES_DEREGISTRATION {
        assert_eq!(pair.process.ask("deregister"), "Ok(())");
        let copies = [pair.inward(0, 0, 4096)];
        let error = refused(pair.transport.read(&pair.peer, &copies, None, soon()));
        assert!(matches!(error, Error::OutsideRegion { side: Side::Peer, .. }), "{error}");
        let copies = [pair.outward(0, 0, 4096)];
        let error = refused(pair.transport.write(&pair.peer, &copies, None, soon()));
        assert!(matches!(error, Error::OutsideRegion { side: Side::Peer, .. }), "{error}");
        assert_eq!(pair.process.ask("register"), "ok");
        // The description is the same, and connecting again brings the regions up to date.
        let again = pair.transport.connect(&pair.process.description, soon()).unwrap();
        pair.peer = again;
        done(&pair.read_all());
    }
    // Our own side, for all: a region that was never registered, or is not any more.
    let other = Memory::new(MIB);
    let copy = ByteCopy { source: pair.process.base, destination: other.base(), bytes: 4096 };
    // SAFETY: the memory outlives the registration, and is only touched through its address.
    let id = unsafe { pair.transport.register(other.region()) }.unwrap();
    done(&pair.read(&[copy]));
    pair.transport.deregister(id, soon()).unwrap();
    let error = refused(pair.transport.read(&pair.peer, &[copy], None, soon()));
    assert!(matches!(error, Error::OutsideRegion { side: Side::Local, .. }), "{error}");
    assert_eq!(pair.transport.deregister(id, soon()), Err(Error::NoSuchRegion));
}

fn a_region_in_use_is_busy<B: BackEnd>() {
    if !B::NEEDS_THE_PEER {
        // Nothing can be held up half-way there: the deadline tests say why.
        return;
    }
    let pair = Pair::<B>::new(32 * MIB);
    let other = Memory::new(32 * MIB);
    // SAFETY: the memory outlives the transport (declared first, dropped last) and is only touched
    // through its address.
    let id = unsafe { pair.transport.register(other.region()) }.unwrap();
    pair.process.stop();
    let copy =
        ByteCopy { source: pair.process.base, destination: other.base(), bytes: 32 * MIB as u64 };
    let operation = pair.read(&[copy]);
    // Until it has been sent.
    std::thread::sleep(Duration::from_millis(300));
    let error = pair.transport.deregister(id, Instant::now());
    assert_eq!(error, Err(Error::RegionBusy));
    // A handle that is dropped does not let go of the region before it is safe.
    drop(operation);
    if !B::SETTLES_ALONE {
        assert_eq!(pair.transport.deregister(id, Instant::now()), Err(Error::RegionBusy));
    }
    pair.process.resume();
    pair.transport.deregister(id, soon()).unwrap();
    drop(pair);
}

fn deadlines_hold<B: BackEnd>() {
    let pair = Pair::<B>::new(64 * MIB);
    // Already past: nothing that ends well may be reported.
    let copies = [pair.inward(0, 0, 64 * MIB)];
    let past = pair.transport.read(&pair.peer, &copies, None, Instant::now()).unwrap();
    let status = past.wait(soon());
    assert!(
        matches!(status, Status::Failed(Error::DeadlinePassed) | Status::Done(_)),
        "{status:?}"
    );
    // A peer that is stopped keeps silent; the deadline comes all the same.
    pair.process.stop();
    let deadline = Instant::now() + Duration::from_millis(400);
    let operation = pair.transport.read(&pair.peer, &copies, Some(b"late"), deadline).unwrap();
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
    let unpolled = pair.transport.read(&pair.peer, &copies, Some(b"late"), deadline).unwrap();
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
        pair.ours.set(&vec![0xee; bytes]);
        // Pieces apart, so that they are not merged into one.
        let copies: Vec<ByteCopy> =
            (0..128).map(|i| pair.inward(i * 512 * 1024, i * 512 * 1024, 500 * 1024)).collect();
        let until = match end {
            End::Deadline => Instant::now() + Duration::from_millis(300),
            End::Cancel | End::Disconnect => soon(),
        };
        let operation = pair.transport.read(&pair.peer, &copies, Some(b"never"), until).unwrap();
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
        // Long enough for what can settle without the peer.
        let status = operation.wait(Instant::now() + Duration::from_millis(500));
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
        pair.ours.set(&mark);
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

fn cancelled_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Cancel);
}

fn timed_out_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Deadline);
}

fn disconnected_reads_never_land_late<B: BackEnd>() {
    reads_never_land_late::<B>(End::Disconnect);
}

fn cancelled_writes_never_land_late<B: BackEnd>() {
    let bytes = 64 * MIB;
    let mut pair = Pair::<B>::new(bytes);
    for round in 0..rounds(3) {
        pair.ours.set(&vec![0xee; bytes]);
        let copies: Vec<ByteCopy> =
            (0..128).map(|i| pair.outward(i * 512 * 1024, i * 512 * 1024, 500 * 1024)).collect();
        // So that there is a connection for bytes to be on.
        done(&pair.read(&[pair.inward(0, 0, 1)]));
        if round == 1 {
            pair.process.stop();
        }
        let operation = pair.transport.write(&pair.peer, &copies, None, soon()).unwrap();
        match round {
            // Until the connection is full of bytes.
            1 => std::thread::sleep(Duration::from_millis(300)),
            2 => std::thread::sleep(Duration::from_millis(5)),
            _ => {}
        }
        if round > 0 {
            pair.process.stop();
        }
        operation.cancel();
        let status = operation.wait(Instant::now() + Duration::from_millis(500));
        if B::NEEDS_THE_PEER && round == 1 {
            // What is in the peer's socket lands when it goes on.
            assert!(matches!(status, Status::Quarantined(_)), "{status:?}");
        }
        pair.process.resume();
        let status = operation.wait(soon());
        assert!(status.is_safe(), "{status:?}");
        // The peer's memory may now be used for something else.
        assert_eq!(pair.process.ask("fill 8"), "ok");
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(
            pair.process.hash(),
            hash(&pattern(8, bytes)),
            "bytes landed after the destination was declared safe"
        );
    }
}

fn cancelling_one_disturbs_no_other<B: BackEnd>() {
    let bytes = 64 * MIB;
    let mut pair = Pair::<B>::new(2 * bytes);
    let theirs = pattern(PEER_SEED, 2 * bytes);
    // One that goes on, in each direction, on half of the memory.
    let read = pair.read(&[pair.inward(0, 0, bytes)]);
    let half = bytes / 2;
    let copies = [pair.outward(bytes, bytes + half, half)];
    let write = pair.transport.write(&pair.peer, &copies, None, soon()).unwrap();
    let cancelled: Vec<_> = (0..40)
        .map(|i| {
            let copies = [pair.inward(0, bytes + half, half)];
            let operation = pair.read(&copies);
            if i % 2 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            operation.cancel();
            operation
        })
        .collect();
    done(&read);
    done(&write);
    for operation in &cancelled {
        assert!(operation.wait(soon()).is_safe());
    }
    assert!(
        pair.ours.snapshot()[..bytes] == theirs[..bytes],
        "a read beside cancelled ones is not exact"
    );
    let mut written = theirs;
    let ours = pattern(OUR_SEED, 2 * bytes);
    written[bytes + half..].copy_from_slice(&ours[bytes..bytes + half]);
    assert_eq!(pair.process.hash(), hash(&written), "a write beside cancelled reads is not exact");
}

fn dropped_transports_never_land_late<B: BackEnd>() {
    let bytes = 64 * MIB;
    let pair = Pair::<B>::new(bytes);
    let Pair { transport, peer, process, ours, .. } = pair;
    process.stop();
    let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: bytes as u64 };
    let operation = transport.read(&peer, &[copy], None, soon()).unwrap();
    drop(peer);
    drop(transport);
    let status = operation.poll();
    assert!(status.is_safe(), "{status:?}");
    let mark = vec![0xaa; bytes];
    ours.set(&mark);
    process.resume();
    std::thread::sleep(Duration::from_millis(700));
    assert!(ours.snapshot() == mark, "bytes landed after the transport was dropped");
}

fn a_killed_peer_is_an_error<B: BackEnd>() {
    let bytes = 64 * MIB;
    for round in 0..rounds(3) {
        let pair = Pair::<B>::new(bytes);
        let before = pair.ours.byte(0);
        let deadline = Instant::now() + Duration::from_secs(30);
        // More than can be done before the kill.
        let operations: Vec<_> = (0..30)
            .map(|i| {
                let reads = [pair.inward(0, 0, bytes)];
                let half = bytes / 2;
                let writes = [pair.outward(half, half, half)];
                let (transport, peer) = (&pair.transport, &pair.peer);
                if round == 2 && i % 2 == 0 {
                    transport.write(peer, &writes, None, deadline).unwrap()
                } else {
                    transport.read(peer, &reads, None, deadline).unwrap()
                }
            })
            .collect();
        if round > 0 {
            wait_until("bytes move", || pair.ours.byte(0) != before);
        }
        pair.process.kill();
        let mut failed = 0;
        for operation in &operations {
            let status = operation.wait(deadline);
            match status {
                Status::Done(_) => {}
                Status::Failed(Error::PeerLost(_)) => failed += 1,
                other => panic!("a killed peer gave {other:?}"),
            }
        }
        assert!(failed > 0, "the peer was killed too late to matter");
        let copies = [pair.inward(0, 0, 10)];
        let error = refused(pair.transport.read(&pair.peer, &copies, None, deadline));
        assert!(matches!(error, Error::PeerLost(_)), "{error}");
    }
}

fn a_restarted_peer_is_reachable<B: BackEnd>() {
    let bytes = MIB;
    let mut pair = Pair::<B>::new(bytes);
    for seed in 10..13 {
        done(&pair.read_all());
        pair.process.kill();
        pair.process = Peer::start::<B>(bytes, seed);
        // The old peer is not mistaken for the new one.
        let copies = [pair.inward(0, 0, 4096)];
        let deadline = Instant::now() + Duration::from_secs(20);
        let old = pair.transport.read(&pair.peer, &copies, None, deadline);
        let error = refused(old);
        assert!(matches!(error, Error::PeerLost(_) | Error::OutsideRegion { .. }), "{error}");
        if seed == 11 {
            pair.transport.disconnect(&pair.peer);
        }
        let peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
        pair.peer = peer;
        done(&pair.read_all());
        assert!(pair.ours.snapshot() == pattern(seed, bytes));
    }
}

fn disconnecting_ends_operations<B: BackEnd>() {
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
    let error = refused(pair.transport.read(&pair.peer, &[pair.inward(0, 0, 10)], None, soon()));
    assert_eq!(error, Error::Disconnected);
    // A second time does no harm, and one may connect again.
    pair.transport.disconnect(&pair.peer);
    let peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
    let copies = [pair.inward(0, 0, 64 * MIB)];
    done(&pair.transport.read(&peer, &copies, None, soon()).unwrap());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, pair.bytes));
}

fn posting_does_not_wait<B: BackEnd>() {
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

fn bad_descriptions_are_refused<B: BackEnd>() {
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

fn reports_add_up<B: BackEnd>() {
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
    assert_eq!((report.bytes, report.copies, report.copies_posted), (158, 4, 2));
    assert!(report.rate().is_some());
    let failed = pair.transport.read(&pair.peer, &[pair.inward(0, 0, 10)], None, Instant::now());
    let failed = failed.map(|operation| operation.wait(soon()));
    let failures = u64::from(!matches!(failed, Ok(Status::Done(_))));
    let statistics = pair.transport.statistics();
    assert_eq!(statistics.started, 2);
    assert_eq!((statistics.done, statistics.failed), (2 - failures, failures));
    assert_eq!(statistics.bytes, 158 + 10 * (1 - failures));
    assert_eq!(statistics.quarantined, 0);
}

fn gpu_memory<B: BackEnd>() {
    let transport = B::new().unwrap();
    let memory = Memory::new(MIB);
    let mut region = memory.region();
    region.place = Place::Gpu(0);
    // SAFETY: the memory outlives the transport. Either it is refused, or nobody is told of it.
    let result = unsafe { transport.register(region) };
    match result {
        Err(Error::Unsupported(_)) => {}
        // NIXL takes an address for what it is said to be, where there is no GPU to ask.
        Ok(_) => assert!(B::NAME.starts_with("nixl")),
        Err(other) => panic!("{other}"),
    }
    drop(transport);
}

fn nothing_leaks<B: BackEnd>() {
    let mut process = Peer::start::<B>(MIB, PEER_SEED);
    let cycle = || {
        let ours = Memory::new(MIB);
        let transport = B::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        let region = unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: MIB as u64 };
        let operation = transport.read(&peer, &[copy], None, soon()).unwrap();
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
        let ours = Memory::new(MIB);
        let transport = B::new().unwrap();
        // SAFETY: as above.
        unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let copy = ByteCopy { source: process.base, destination: ours.base(), bytes: MIB as u64 };
        done(&transport.read(&peer, &[copy], None, soon()).unwrap());
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

/// Reads from a process that the kernel does not let it read: started by the test below.
pub(crate) fn reader(arguments: &[String]) {
    let [description, base, bytes] = arguments else {
        panic!("a reader needs a description, an address and a length");
    };
    // SAFETY: plain calls about this process alone. Root may read every process, so become nobody;
    // somebody else already is not root, and the peer has closed itself to them.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
        }
    }
    let bytes: usize = bytes.parse().unwrap();
    let ours = Memory::new(bytes);
    let transport = Local::new(LocalOptions::default()).unwrap();
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(ours.region()) }.unwrap();
    let peer = transport.connect(&from_hex(description), soon()).unwrap();
    let Route::Tcp { obstacle } = peer.route() else {
        panic!("the kernel should have forbidden this: {peer:?}");
    };
    assert!(matches!(obstacle, Error::System { code: Some(libc::EPERM), .. }), "{obstacle}");
    let copy =
        ByteCopy { source: base.parse().unwrap(), destination: ours.base(), bytes: bytes as u64 };
    done(&transport.read(&peer, &[copy], None, soon()).unwrap());
    assert!(ours.snapshot() == pattern(PEER_SEED, bytes));
    drop(transport);
}

fn falls_back_to_tcp_and_says_so() {
    // Not readable by others of the same user; the peer inherits it.
    // SAFETY: a plain request to the kernel about this process.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    let transport = LocalEnd::new().unwrap();
    let memory = Memory::new(5 * MIB);
    memory.set(&pattern(PEER_SEED, memory.bytes()));
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(memory.region()) }.unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args([crate::CHILD, "reader", LocalEnd::NAME])
        .arg(to_hex(&transport.describe().unwrap()))
        .args([memory.base().to_string(), memory.bytes().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
    drop(transport);
}

fn a_missing_plugin_is_named() {
    // SAFETY: no other thread runs in this process yet.
    unsafe { std::env::set_var("NIXL_PLUGIN_DIR", "/nonexistent/plugins") };
    let Err(Error::Library(message)) = Nixl::new(&NixlOptions::default()) else {
        panic!("a plugin was loaded that is not there");
    };
    let file = "/nonexistent/plugins/libplugin_UCX.so: it is not there";
    assert!(message.contains(file), "{message}");
    assert!(message.contains("kvferry nixl install"), "{message}");
}

/// Not a promise but the reason for one: NIXL's own interface lets a request go, and its bytes land
/// afterwards. If this test ever fails, quarantine can be made cheaper.
fn released_requests_of_nixl_land_late() {
    let bytes = 64 * MIB;
    let process = Peer::start::<NixlTcpEnd>(bytes, PEER_SEED);
    let library = capi::Nixl::load(&find(None).unwrap()).unwrap();
    // With NIXL's own default of no threads besides its progress thread.
    let mut settings = NixlOptions::default().settings();
    settings.parameters.retain(|(key, _)| key.starts_with("ucx"));
    let agent = capi::Agent::new(&library, "bare", &settings).unwrap();
    let agent = std::sync::Arc::new(agent);
    let ours = Memory::new(bytes);
    let span = (ours.base(), bytes as u64, Place::Host);
    agent.register(span).unwrap();
    // The metadata is the last block of the description, behind 8 + 16 bytes of names, 4 of a count
    // and 20 for the one region.
    let name = agent.load(&process.description[8 + 16 + 4 + 20 + 4..]).unwrap();
    let theirs = (process.base, bytes as u64, Place::Host);
    let request = || agent.request(false, &name, [span].into_iter(), [theirs].into_iter()).unwrap();
    // Once to connect.
    let mut first = request();
    let mut ended = first.post().unwrap();
    wait_until("the first read is done", || {
        ended = ended || first.ended().unwrap();
        ended
    });
    process.stop();
    let mut second = request();
    assert!(!second.post().unwrap());
    std::thread::sleep(Duration::from_millis(100));
    drop(second);
    agent.forget(&name).unwrap();
    ours.set(&vec![0xaa; bytes]);
    process.resume();
    wait_until("bytes land although the request was released", || {
        ours.snapshot() == pattern(PEER_SEED, bytes)
    });
    drop(first);
    agent.deregister(span).unwrap();
    drop(agent);
}
