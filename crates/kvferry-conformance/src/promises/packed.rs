//! Packed reads keep every promise that other reads keep.

use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Manifest};
use kvferry_plan::{Plan as Compiled, Request, Table, Transfer};
use kvferry_testkit::drive::{self, Drawn};
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{Shape, draw};
use kvferry_transport::{Error, Loops, Operation, Side, Status, Transport};

use crate::back_end::BackEnd;
use crate::data::{hash, pattern};
use crate::memory::Memory;
use crate::pair::{MIB, OUR_SEED, PEER_SEED, Pair, done, refused, rounds, soon};
use crate::peer::wait_until;

/// Loops of `runs` runs of `run` bytes for each of some blocks, in another order on the other side.
pub(super) fn loops<B: BackEnd>(pair: &Pair<B>, run: u64, runs: u64, blocks: u32) -> Loops {
    let mut loops = Loops::default();
    let pairs = (0..blocks)
        .map(|at| BlockPair { source: (at * 7 + 3) % blocks, destination: blocks - 1 - at });
    let table = loops.add_table(pairs);
    let inner = Loop { count: runs, source: run * 2, destination: run + 1 };
    let (from, to) = (pair.process.base + run, pair.ours.base());
    let strides = (runs * run * 2, runs * (run + 1));
    loops.add_nest((from, to), run, strides, &[inner], table).unwrap();
    loops
}

/// What loops do, in a model of both memories.
pub(super) fn carry_out<B: BackEnd>(pair: &Pair<B>, loops: &Loops, theirs: &[u8], ours: &mut [u8]) {
    for copy in loops.copies() {
        let from = (copy.source - pair.process.base) as usize;
        let to = (copy.destination - pair.ours.base()) as usize;
        ours[to..to + copy.bytes as usize]
            .copy_from_slice(&theirs[from..from + copy.bytes as usize]);
    }
}

pub(super) fn packed_reads_are_exact<B: BackEnd>() {
    let bytes = 24 * MIB + 77;
    let mut pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut ours = pattern(OUR_SEED, bytes);
    // Short runs, runs of odd lengths, and runs that are longer than a part.
    let shapes = [(2, 100, 300), (512, 16, 1000), (63, 33, 500), (3 << 20, 1, 3), (1, 1, 1)];
    for (run, runs, blocks) in shapes {
        let loops = loops(&pair, run, runs, blocks);
        let operation = pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
        let Status::Done(report) = operation.wait(soon()) else { panic!("{operation:?}") };
        let packed = if B::PACKS { loops.bytes() } else { 0 };
        assert_eq!((report.bytes, report.packed), (loops.bytes(), packed));
        carry_out(&pair, &loops, &theirs, &mut ours);
        assert!(pair.ours.snapshot() == ours, "runs of {run} bytes are not exact");
        assert_eq!(pair.process.hash(), hash(&theirs), "a read changed its source");
    }
    let empty = pair.transport.read_packed(&pair.peer, &Loops::default(), soon()).unwrap();
    done(&empty);
    assert_eq!(pair.transport.packs_below(&pair.peer) > 0, B::PACKS);
    // Far more parts than are packed to measure by.
    let (packed, kept) = staging(&mut pair);
    assert_eq!(packed > 60, B::PACKS, "{packed} parts were packed");
    assert_eq!(kept, 0, "memory to pack into is kept");
}

/// Parts that the peer has packed, and bytes that it packs into at this moment.
fn staging<B: BackEnd>(pair: &mut Pair<B>) -> (u64, u64) {
    let mut said = (0, 0);
    wait_until("the peer has packed all", || {
        let answer = pair.process.ask("staging");
        let (packed, kept) = answer.split_once(' ').unwrap();
        said = (packed.parse().unwrap(), kept.parse().unwrap());
        said.1 == 0
    });
    said
}

/// Real plans of random pairs: in every way, the bytes that the judged copies say.
pub(super) fn random_pairs_are_exact_in_every_way<B: BackEnd>() {
    let bytes = 4 * MIB;
    let pair = Pair::<B>::new(bytes);
    let theirs = pattern(PEER_SEED, bytes);
    let mut tried = 0;
    let mut seed = 0;
    while tried < rounds(60) {
        seed += 1;
        let drawn = Drawn::new(seed);
        let Ok(plan) = drive::compile(&drawn.source, &drawn.sources, &drawn.destination, 0) else {
            continue;
        };
        let mut dice = Dice::new(seed);
        let request = draw(&drawn.source, &drawn.destination, 60, Shape::Scattered, &mut dice);
        let tables = |owned: &[kvferry_testkit::request::OwnedTable]| -> Vec<(u64, Vec<u32>)> {
            owned.iter().map(|table| (table.first, table.blocks.clone())).collect()
        };
        let (source, destination) = (tables(&request.source), tables(&request.destination));
        let borrowed = |tables: &[(u64, Vec<u32>)]| -> Vec<Table<'static>> {
            // Leaked: a test's few tables.
            tables
                .iter()
                .map(|(first, blocks)| Table { first: *first, blocks: blocks.clone().leak() })
                .collect()
        };
        let request = Request {
            tokens: request.tokens,
            cached: &request.cached,
            source: &borrowed(&source),
            destination: &borrowed(&destination),
        };
        let ours = &drawn.destination.ranks[0].manifest;
        for (index, &rank) in drawn.sources.iter().enumerate() {
            let from = &drawn.source.ranks[rank].manifest;
            if extent(ours) > bytes as u64 || extent(from) > bytes as u64 {
                continue;
            }
            let moved = Moved { pair: &pair, from, to: ours };
            tried += usize::from(moved.check(&plan, &request, index, &theirs));
        }
    }
}

/// From the first byte of a manifest's regions to the last.
fn extent(manifest: &Manifest) -> u64 {
    let regions = manifest.regions();
    let start = regions.iter().map(|region| region.base).min().unwrap_or(0);
    regions.iter().map(|region| region.base + region.bytes).max().unwrap_or(0) - start
}

/// Regions of manifests, moved to where the memory of a pair is.
struct Moved<'a, B: BackEnd> {
    pair: &'a Pair<B>,
    from: &'a Manifest,
    to: &'a Manifest,
}

impl<B: BackEnd> Moved<'_, B> {
    fn loops(&self, transfer: &Transfer<'_>, source: usize) -> Loops {
        let start = |manifest: &Manifest| {
            manifest.regions().iter().map(|region| region.base).min().unwrap_or(0)
        };
        let (from, to) = (self.pair.process.base, self.pair.ours.base());
        let plain = transfer.loops(source).unwrap();
        let mut moved = Loops::default();
        for table in 0..plain.tables() {
            moved.add_table(plain.pairs()[plain.table(table)].iter().copied());
        }
        for nest in plain.nests() {
            let at =
                ((nest.source - start(self.from)) + from, (nest.destination - start(self.to)) + to);
            moved.add_nest(at, nest.run, nest.blocks, nest.loops, nest.table).unwrap();
        }
        moved
    }

    /// Whether there was anything to read.
    fn check(&self, plan: &Compiled, request: &Request<'_>, source: usize, theirs: &[u8]) -> bool {
        let exact = plan.transfer(request).unwrap();
        let loops = self.loops(&exact, source);
        let poison = vec![0xee; self.pair.bytes];
        let mut expected = poison.clone();
        carry_out(self.pair, &loops, theirs, &mut expected);
        let Pair { transport, peer, ours, .. } = self.pair;
        for way in ["direct", "packed"] {
            ours.write(0, &poison);
            let operation = match way {
                "direct" => transport.read(peer, &loops, soon()),
                _ => transport.read_packed(peer, &loops, soon()),
            };
            done(&operation.unwrap());
            assert!(ours.snapshot() == *expected, "{way} is not exact");
        }
        loops.bytes() > 0
    }
}

pub(super) fn packed_outside_is_refused<B: BackEnd>() {
    let bytes = MIB;
    let mut pair = Pair::<B>::new(bytes);
    let (theirs, ours) = (pair.process.base, pair.ours.base());
    let end = bytes as u64;
    // Starts on each side, and the stride of four blocks of 1,000 bytes.
    let cases = [
        (theirs - 1, ours, 5000, Side::Peer),
        (theirs + end - 10_000, ours, 5000, Side::Peer),
        (theirs, ours - 1, 5000, Side::Local),
        (theirs, ours + end - 999, 0, Side::Local),
    ];
    for (from, to, stride, expected) in cases {
        let mut loops = Loops::default();
        let table = loops.add_table((0..4).map(|at| BlockPair { source: at, destination: at }));
        let inner = Loop { count: 10, source: 100, destination: 100 };
        loops.add_nest((from, to), 50, (stride, 1000), &[inner], table).unwrap();
        let error = refused(pair.transport.read_packed(&pair.peer, &loops, soon()));
        assert!(matches!(error, Error::OutsideRegion { side, .. } if side == expected), "{error}");
    }
    assert_eq!(pair.process.hash(), hash(&pattern(PEER_SEED, bytes)));
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, bytes));
}

/// Starts packed reads, stops the peer while they run, and ends them. When they are safe, marks the
/// destination, lets the peer go on, and sees that the mark stays.
pub(super) fn packed_reads_never_land_late<B: BackEnd>() {
    let bytes = 64 * MIB;
    let mut pair = Pair::<B>::new(bytes);
    let loops = loops(&pair, 510, 16, 4000);
    let mut caught = 0;
    for round in 0..rounds(6) {
        pair.ours.write(0, &vec![0xee; bytes]);
        let until = match round % 2 {
            0 => soon(),
            _ => Instant::now() + Duration::from_millis(300),
        };
        let operation = pair.transport.read_packed(&pair.peer, &loops, until).unwrap();
        if round % 3 > 0 {
            wait_until("bytes arrive", || {
                (0..64).any(|at| pair.ours.byte(at * 500_000) != 0xee)
                    || operation.poll() != Status::InProgress
            });
        }
        pair.process.stop();
        if round % 2 == 0 {
            operation.cancel();
        }
        wait_until("the outcome is known", || operation.poll().outcome().is_some());
        // Long enough for what can settle without the peer, however busy this machine is.
        let patience = Duration::from_millis(if B::SETTLES_ALONE { 30_000 } else { 500 });
        if matches!(operation.wait(Instant::now() + patience), Status::Quarantined(_)) {
            assert!(!B::SETTLES_ALONE, "{operation:?}");
            pair.process.resume();
        }
        let status = operation.wait(soon());
        assert!(status.is_safe(), "{status:?}");
        caught +=
            usize::from(matches!(status, Status::Failed(Error::Cancelled | Error::DeadlinePassed)));
        let mark = vec![0xaa; bytes];
        pair.ours.write(0, &mark);
        pair.process.resume();
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            pair.ours.snapshot() == mark,
            "bytes landed after the destination was declared safe"
        );
        assert_eq!(pair.transport.statistics().quarantined, 0);
    }
    assert!(caught > 0 || !B::PACKING_NEEDS_THE_PEER, "no read was caught in mid-transfer");
    // And the transport is as good as new: nothing to pack into was lost.
    let (theirs, mut ours) = (pattern(PEER_SEED, bytes), vec![0xaa; bytes]);
    done(&pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap());
    carry_out(&pair, &loops, &theirs, &mut ours);
    assert!(pair.ours.snapshot() == ours);
    assert_eq!(staging(&mut pair).1, 0, "memory to pack into is kept");
    wait_until("our own memory to fetch into is back", || pair.transport.staging().in_use == 0);
}

/// However many are cancelled on the connections that a read shares with them.
pub(super) fn cancelling_packed_reads_disturbs_no_other<B: BackEnd>() {
    let bytes = 64 * MIB;
    let pair = Pair::<B>::new(bytes);
    let loops = loops(&pair, 510, 16, 4000);
    let read = || pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
    let theirs = pattern(PEER_SEED, bytes);
    let mut expected = pattern(OUR_SEED, bytes);
    carry_out(&pair, &loops, &theirs, &mut expected);
    let stays = read();
    let mut cancelled = Vec::new();
    while stays.poll() == Status::InProgress && cancelled.len() < 100 {
        let operation = read();
        std::thread::sleep(Duration::from_micros(500 * (cancelled.len() as u64 % 5)));
        // So that it is cancelled while a part is being fetched, where that takes the peer.
        pair.process.stop();
        operation.cancel();
        std::thread::sleep(Duration::from_millis(3));
        pair.process.resume();
        cancelled.push(operation);
    }
    done(&stays);
    assert!(cancelled.iter().all(|operation| operation.wait(soon()).is_safe()));
    assert!(pair.ours.snapshot() == expected, "a read beside cancelled ones is not exact");
    wait_until("our own memory to fetch into is back", || pair.transport.staging().in_use == 0);
}

pub(super) fn a_peer_killed_while_it_packs_is_an_error<B: BackEnd>() {
    let bytes = 64 * MIB;
    let pair = Pair::<B>::new(bytes);
    let loops = loops(&pair, 510, 16, 4000);
    let deadline = Instant::now() + Duration::from_secs(30);
    let read = || pair.transport.read_packed(&pair.peer, &loops, deadline).unwrap();
    let operations: Vec<_> = (0..8).map(|_| read()).collect();
    pair.process.kill();
    if B::OUTLIVES_THE_PEER {
        // Nothing is lost.
        operations.iter().for_each(done);
        return;
    }
    for operation in &operations {
        let status = operation.wait(deadline);
        assert!(
            matches!(status, Status::Done(_) | Status::Failed(Error::PeerLost(_))),
            "{status:?}"
        );
    }
    let error = refused(pair.transport.read_packed(&pair.peer, &loops, deadline));
    assert!(matches!(error, Error::PeerLost(_)), "{error}");
}
