//! What only `cuda` promises: mappings, loops, and what happens when the card refuses.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvferry_cuda::{Cuda, CudaOptions, mappings};
use kvferry_layout::{BlockPair, Loop, Loops, Region};
use kvferry_testkit::one_by_one;
use kvferry_transport::{ByteCopy, Error, Operation, Status, Transport};

use super::leaks::comes_back;
use super::twin::{Gate, twin, twin_refuses};
use crate::back_end::{BackEnd, CudaTwinEnd, MappedTwinEnd};
use crate::census;
use crate::data::pattern;
use crate::memory::{CardMemory, Memory, card};
use crate::pair::{MIB, OUR_SEED, PEER_SEED, Pair, done, soon};
use crate::peer::{Peer, wait_until};

/// A peer's memory is mapped while the peer is connected, and not longer: also when it has died, comes
/// back as another, or its transport is dropped.
pub(super) fn mappings_go_with_their_peers<B: BackEnd>() {
    assert_eq!(mappings(), 0);
    let mut pair = Pair::<B>::new(MIB);
    assert_eq!(mappings(), 1);
    // Known already.
    pair.peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
    assert_eq!(mappings(), 1);
    for seed in 10..20 {
        let operation = pair.read_all();
        pair.process.kill();
        if seed % 2 == 0 {
            // The mapping is kept until the kernel has ended.
            pair.transport.disconnect(&pair.peer);
            assert!(operation.wait(soon()).is_safe());
        } else {
            done(&operation);
            pair.transport.disconnect(&pair.peer);
        }
        assert_eq!(mappings(), 0, "of a peer that has died");
        pair.process = Peer::start::<B>(MIB, seed);
        pair.peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
        assert_eq!(mappings(), 1);
    }
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(19, MIB));
    let Pair { transport, peer, .. } = pair;
    drop(transport);
    assert_eq!(mappings(), 0, "of a transport that was dropped");
    drop(peer);
}

/// Allocations are told apart by their handles, not by their addresses, and what a peer does not name any more is
/// closed when it is connected to again.
pub(super) fn only_what_is_described_stays_open() {
    let mut pair = Pair::<CudaTwinEnd>::new(MIB);
    let base = pair.process.base;
    for seed in 10..20 {
        let gate = Gate::close();
        let before = pair.read_all();
        pair.process.exchange(seed);
        assert_eq!(pair.process.base, base, "the address was not given out again");
        pair.peer = pair.transport.connect(&pair.process.description, soon()).unwrap();
        // What a kernel reads is kept until it has ended.
        assert_eq!(mappings(), 2);
        gate.open();
        done(&before);
        assert_eq!(mappings(), 1);
        let old = if seed == 10 { PEER_SEED } else { seed - 1 };
        assert!(pair.ours.snapshot() == pattern(old, MIB), "memory changed under a kernel");
        done(&pair.read_all());
        assert!(pair.ours.snapshot() == pattern(seed, MIB), "the memory before was read");
    }
    // The same for mapped memory, whose descriptors have the same numbers again.
    let mut mapped = Pair::<MappedTwinEnd>::new(MIB);
    let base = mapped.process.base;
    for seed in 10..13 {
        done(&mapped.read_all());
        mapped.process.exchange(seed);
        assert_eq!(mapped.process.base, base, "the address was not given out again");
        mapped.peer = mapped.transport.connect(&mapped.process.description, soon()).unwrap();
        assert_eq!(mappings(), 2);
        done(&mapped.read_all());
        assert!(mapped.ours.snapshot() == pattern(seed, MIB), "the memory before was read");
    }
}

/// A description with other regions: (base, bytes), all in the one allocation that it has.
fn described(description: &[u8], regions: &[(u64, u64)]) -> Vec<u8> {
    let mark = description.windows(8).position(|part| part == b"kvfy-pid").unwrap();
    let (front, rest) = description.split_at(mark + 16);
    // How many there are; base, bytes; allocation, no parts, handle.
    let one = &rest[4 + 16..];
    assert_eq!(one.len(), 8 + 4 + 64);
    let mut out = [front, &(regions.len() as u32).to_le_bytes()[..]].concat();
    for (base, bytes) in regions {
        out.extend(base.to_le_bytes());
        out.extend(bytes.to_le_bytes());
        out.extend(one);
    }
    out
}

/// Also where the allocation is open already: by a region before it, or by a description before it.
pub(super) fn regions_beyond_their_allocation_are_refused() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    let (base, bytes) = (pair.process.base, MIB as u64);
    let half = bytes / 2;
    let beyond = [
        vec![(base, half), (base + half, half + 1)],
        vec![(base, bytes + 4096)],
        vec![(base, 16), (base + 16, u64::MAX - base - 16)],
        vec![(base, half), (base + bytes, 16)],
    ];
    let other = CudaTwinEnd::new().unwrap();
    for regions in beyond {
        let description = described(&pair.process.description, &regions);
        for transport in [&other, &pair.transport] {
            let result = transport.connect(&description, soon());
            assert!(matches!(result, Err(Error::BadDescription(_))), "{regions:?}: {result:?}");
        }
        assert_eq!(mappings(), 1, "what was opened for nothing is closed");
    }
    let halves = described(&pair.process.description, &[(base, half), (base + half, half)]);
    pair.transport.connect(&halves, soon()).unwrap();
    assert_eq!(mappings(), 1);
    let copies = [pair.inward(0, 0, MIB / 2), pair.inward(MIB / 2, MIB / 2, MIB / 2)];
    done(&pair.read(&copies));
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
}

/// Memory of this process is not opened: it is looked up in what is registered.
pub(super) fn regions_of_this_process_must_be_registered() {
    let (theirs, ours) = (CardMemory::new(MIB), CardMemory::new(MIB));
    theirs.write(0, &pattern(PEER_SEED, MIB));
    let (source, reader) = (CudaTwinEnd::new().unwrap(), CudaTwinEnd::new().unwrap());
    let (base, half) = (theirs.base(), MIB as u64 / 2);
    let region = Region { bytes: half, ..theirs.region() };
    // SAFETY: the memory outlives the transports, and is only touched through its address.
    let id = unsafe { source.register(region) }.unwrap();
    // SAFETY: as above.
    unsafe { reader.register(ours.region()) }.unwrap();
    let description = source.describe().unwrap();
    for (base, bytes) in
        [(base, half + 1), (base - 1, 16), (base + half, 16), (base, u64::MAX - base)]
    {
        let result = reader.connect(&described(&description, &[(base, bytes)]), soon());
        assert!(matches!(result, Err(Error::BadDescription(_))), "{base:#x} {bytes}: {result:?}");
    }
    let peer = reader.connect(&description, soon()).unwrap();
    let copy = ByteCopy { source: base, destination: ours.base(), bytes: half };
    done(&reader.read(&peer, &one_by_one(&[copy]), soon()).unwrap());
    assert!(ours.snapshot()[..MIB / 2] == pattern(PEER_SEED, MIB)[..MIB / 2]);
    source.deregister(id, soon()).unwrap();
    let result = reader.connect(&description, soon());
    assert!(matches!(result, Err(Error::BadDescription(_))), "{result:?}");
    drop((source, reader));
}

/// Loops and tables instead of a list: what they say, and nothing else.
pub(super) fn loops_are_exact<B: BackEnd>() {
    let pair = Pair::<B>::new(4 * MIB);
    let (theirs, mut ours) = (pattern(PEER_SEED, 4 * MIB), pattern(OUR_SEED, 4 * MIB));
    let mut loops = Loops::default();
    let pairs = (0..50).map(|at| BlockPair { source: (at * 7) % 50, destination: 49 - at });
    let table = loops.add_table(pairs);
    let start = (pair.process.base + 64, pair.ours.base() + 128);
    // Runs of 4,112 bytes and, behind them, single words that lie across.
    let rows = [Loop { count: 3, source: 5008, destination: 4112 }];
    loops.add_nest(start, 4112, (16_384, 20_480), &rows, table).unwrap();
    let across = [
        Loop { count: 9, source: 2, destination: 96 },
        Loop { count: 48, source: 18, destination: 2 },
    ];
    let start = (pair.process.base + 1_200_000, pair.ours.base() + 1_200_000);
    loops.add_nest(start, 2, (1024, 1024), &across, table).unwrap();
    for copy in loops.copies() {
        let from = (copy.source - pair.process.base) as usize;
        let to = (copy.destination - pair.ours.base()) as usize;
        let bytes = copy.bytes as usize;
        ours[to..to + bytes].copy_from_slice(&theirs[from..from + bytes]);
    }
    done(&pair.transport.read(&pair.peer, &loops, soon()).unwrap());
    assert!(pair.ours.snapshot() == ours, "loops are not exact");
}

/// Other containers, MIG: the cause is named, nothing stays open, and the transport works on.
pub(super) fn memory_that_cannot_be_opened_is_named() {
    let process = Peer::start::<CudaTwinEnd>(MIB, PEER_SEED);
    twin_refuses("open");
    let transport = CudaTwinEnd::new().unwrap();
    let error = transport.connect(&process.description, soon()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("opening the memory of another process"), "{text}");
    assert!(text.contains("not permitted"), "{text}");
    assert_eq!(mappings(), 0);
    // The process that it belongs to may also be gone.
    twin_refuses("nothing");
    drop(process);
    let process = Peer::start::<CudaTwinEnd>(MIB, PEER_SEED);
    let description = process.description.clone();
    drop(process);
    transport.connect(&description, soon()).unwrap_err();
    assert_eq!(mappings(), 0);
}

/// What was compiled beforehand takes programs of its own version: with another it is refused.
pub(super) fn a_kernel_of_another_version_is_refused() {
    twin_refuses("name");
    let text = CudaTwinEnd::new().unwrap_err().to_string();
    assert!(text.contains("/dev/null was compiled from another version of kvferry"), "{text}");
    twin_refuses("nothing");
    CudaTwinEnd::new().unwrap();
}

/// Memory from the virtual-memory interface may be in thousands of parts, each with a descriptor of its own.
pub(super) fn parts_of_mapped_memory_are_taken_one_by_one() {
    let process = Peer::start::<MappedTwinEnd>(MIB, PEER_SEED);
    let transport = CudaTwinEnd::new().unwrap();
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // The lowest number that is free.
    let next = File::open("/dev/null").unwrap().as_raw_fd();
    // SAFETY: plain requests to the kernel, with live values.
    let peer = unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before), 0);
        // The stand-in keeps one of each of the three parts; all three again would be too many.
        let few = libc::rlimit { rlim_cur: next as u64 + 5, ..before };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few), 0);
        let peer = transport.connect(&process.description, soon());
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before), 0);
        peer
    };
    assert_eq!(mappings(), 1, "{peer:?}");
}

/// A kernel that is not through for a long time keeps no core busy, however it is waited for.
pub(super) fn waiting_for_long_is_not_work() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    let gate = Gate::close();
    let operation = pair.read_all();
    gate.wait_for_a_kernel();
    let (began, busy) = (Instant::now(), time_of_this_thread());
    while began.elapsed() < Duration::from_secs(1) {
        assert!(!operation.wait(Instant::now() + Duration::from_micros(500)).is_safe());
    }
    let busy = time_of_this_thread() - busy;
    gate.open();
    done(&operation);
    assert!(busy < Duration::from_millis(500), "{busy:?} of a second");
}

/// How long it has been running.
fn time_of_this_thread() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a plain request to the kernel, with a live value.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Memory from the virtual-memory interface is taken from its process, which has a number in one PID namespace
/// only: with another, as in another container, nothing is taken, whatever process has that number here.
pub(super) fn mapped_memory_of_another_pid_namespace_is_not_taken() {
    let pair = Pair::<MappedTwinEnd>::new(MIB);
    assert_eq!(mappings(), 1);
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
    let description = &pair.process.description;
    let mark = description.windows(8).position(|part| part == b"kvfy-pid").unwrap();
    let transport = CudaTwinEnd::new().unwrap();
    // Another namespace, one that is not known, and no mark at all.
    for (at, bytes) in [(mark + 8, &[1; 8][..]), (mark + 8, &[0; 8]), (mark, &[9; 16])] {
        let mut other = description.clone();
        other[at..at + bytes.len()].copy_from_slice(bytes);
        let error = transport.connect(&other, soon()).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("PID namespace") && text.contains("use nixl"), "{text}");
        assert_eq!(mappings(), 1);
    }
    // Plain allocations have handles, which are no numbers of processes.
    let process = Peer::start::<CudaTwinEnd>(MIB, PEER_SEED);
    let mut plain = process.description.clone();
    let mark = plain.windows(8).position(|part| part == b"kvfy-pid").unwrap();
    plain[mark..mark + 16].fill(9);
    transport.connect(&plain, soon()).unwrap();
    assert_eq!(mappings(), 2);
}

/// All of the peer's memory, in blocks of so many bytes, the last block first.
fn backwards(pair: &Pair<CudaTwinEnd>, bytes: usize) -> Loops {
    let mut loops = Loops::default();
    let blocks = (pair.bytes / bytes) as u32;
    let pair_of = |at| BlockPair { source: at, destination: blocks - 1 - at };
    let table = loops.add_table((0..blocks).map(pair_of));
    let (start, bytes) = ((pair.process.base, pair.ours.base()), bytes as u64);
    loops.add_nest(start, bytes, (bytes, bytes), &[], table).unwrap();
    loops
}

fn is_backwards(pair: &Pair<CudaTwinEnd>, bytes: usize) -> bool {
    let theirs = pattern(PEER_SEED, pair.bytes);
    let expected: Vec<u8> = theirs.chunks_exact(bytes).rev().flatten().copied().collect();
    pair.ours.snapshot() == expected
}

/// Launches overlap each other, but not what fills the memory that they count in: the twin refuses those. There are
/// more of them at once than there is such memory at first.
pub(super) fn launches_do_not_overlap_what_is_filled() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    twin("KVFERRY_TWIN_LATE_MS", "5");
    let reads: Vec<_> = (0..200).map(|_| pair.read_all()).collect();
    reads.iter().for_each(done);
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
}

fn no_memory(operation: &impl Operation) {
    let status = operation.wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cuda { code: 2, .. })), "{status:?}");
}

/// No memory for what a transport or a launch needs: the cause is named, nothing stays behind, and the next one works.
pub(super) fn no_memory_is_an_error_and_leaks_nothing() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    let before = census::take();
    for what in ["memory", "pinned"] {
        twin_refuses(what);
        let error = CudaTwinEnd::new().map(drop).unwrap_err();
        assert!(matches!(error, Error::Cuda { code: 2, .. }), "{error:?}");
        // Where the launch counts, and says that it has ended.
        no_memory(&pair.read_all());
        assert_eq!(pair.transport.statistics().quarantined, 0);
    }
    comes_back("ours", before, census::take);
    twin_refuses("nothing");
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
}

/// Programs that do not fit into staging, by themselves or because others are under way, have memory of their own; where
/// there is none, the read fails, and those under way do not.
pub(super) fn programs_longer_than_staging_have_memory_of_their_own() {
    let pair = Pair::<CudaTwinEnd>::new(24 * MIB);
    // 8 bytes for each of them, 12 MiB and 3 MiB in all; staging has 8 MiB.
    let (long, short) = (backwards(&pair, 16), backwards(&pair, 64));
    let read = |loops: &Loops| pair.transport.read(&pair.peer, loops, soon()).unwrap();
    done(&read(&long));
    assert!(is_backwards(&pair, 16), "a long program is not exact");
    twin("KVFERRY_TWIN_LATE_MS", "20");
    let all: Vec<_> = (0..6).map(|_| read(&short)).collect();
    all.iter().for_each(done);
    assert!(is_backwards(&pair, 64), "programs beside staging are not exact");
    let before = census::take();
    // Whoever is refused waits for those under way: at a gate they would wait for each other.
    twin("KVFERRY_TWIN_LATE_MS", "3000");
    for what in ["memory", "pinned"] {
        twin_refuses(what);
        no_memory(&read(&long));
        // Two have room, the third one has not.
        let under_way = [read(&short), read(&short)];
        no_memory(&read(&short));
        under_way.iter().for_each(done);
        assert_eq!(pair.transport.statistics().quarantined, 0);
    }
    twin_refuses("nothing");
    twin("KVFERRY_TWIN_LATE_MS", "20");
    done(&read(&long));
    assert!(is_backwards(&pair, 16), "a long program is not exact");
    comes_back("ours", before, census::take);
}

/// A toolkit for CUDA 13 beside a driver for CUDA 12: the kernel is compiled by the older NVRTC of a Python
/// environment that has both.
pub(super) fn an_older_driver_is_given_code_that_it_can_load() {
    let packages = folder("packages");
    nvrtc(&packages.join("nvidia/cu13/lib"), 13);
    nvrtc(&packages.join("nvidia/cuda_nvrtc/lib"), 12);
    twin("KVFERRY_TWIN_CUDA", "12");
    let site_packages = vec![packages.clone()];
    drop(Cuda::new(&CudaOptions { site_packages, ..CudaOptions::default() }).unwrap());
    std::fs::remove_dir_all(packages).unwrap();
}

/// The same where the user names a folder that has both.
pub(super) fn an_older_driver_is_given_code_from_a_named_folder() {
    let both = folder("both");
    nvrtc(&both, 13);
    nvrtc(&both, 12);
    twin("KVFERRY_TWIN_CUDA", "12");
    twin("KVFERRY_NVRTC", both.to_str().unwrap());
    drop(Cuda::new(&CudaOptions::default()).unwrap());
    std::fs::remove_dir_all(both).unwrap();
}

/// Where there is no older one, the driver says what is wrong.
pub(super) fn code_that_is_too_new_is_refused_by_the_driver() {
    let only = folder("only");
    nvrtc(&only, 13);
    twin("KVFERRY_TWIN_CUDA", "12");
    twin("KVFERRY_NVRTC", only.to_str().unwrap());
    let refused = Cuda::new(&CudaOptions::default()).unwrap_err();
    assert!(matches!(refused, Error::Cuda { code: 222, .. }), "{refused}");
    std::fs::remove_dir_all(only).unwrap();
}

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvferry-nvrtc-{name}-{}", std::process::id()))
}

/// A stand-in for the NVRTC of a CUDA.
fn nvrtc(folder: &Path, cuda: u32) {
    std::fs::create_dir_all(folder).unwrap();
    let library = folder.join(format!("libnvrtc.so.{cuda}"));
    crate::build(
        &[("nvrtc.c", include_str!("../nvrtc.c"))],
        &[&format!("-DCUDA={cuda}")],
        &library,
    );
}

pub(super) fn kernels_that_do_not_start_fail() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    twin_refuses("launch");
    let status = pair.read_all().wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cuda { .. })), "{status:?}");
    twin_refuses("nothing");
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
}

/// A launch that is refused while another is under way, its program uploaded beside it, disturbs no other.
pub(super) fn kernels_that_do_not_start_disturb_no_other() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    // Too many pairs of blocks to travel with the launch.
    let loops = backwards(&pair, 512);
    twin("KVFERRY_TWIN_LATE_MS", "2000");
    twin_refuses("next");
    let first = pair.transport.read(&pair.peer, &loops, soon()).unwrap();
    let second = pair.transport.read(&pair.peer, &loops, soon()).unwrap().wait(soon());
    assert!(matches!(second, Status::Failed(Error::Cuda { .. })), "{second:?}");
    done(&first);
    twin("KVFERRY_TWIN_LATE_MS", "100");
    twin_refuses("nothing");
    let (one, other) = (
        pair.transport.read(&pair.peer, &loops, soon()).unwrap(),
        pair.transport.read(&pair.peer, &loops, soon()).unwrap(),
    );
    done(&one);
    done(&other);
    assert!(is_backwards(&pair, 512), "loops are not exact");
}

/// A kernel that an error ends sets no signal: the transport asks the card, and nothing waits for ever.
pub(super) fn kernels_that_break_fail() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    twin_refuses("run");
    let status = pair.read_all().wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cuda { .. })), "{status:?}");
    assert_eq!(pair.transport.statistics().quarantined, 0);
}

/// Whoever asks after work while another thread captures a graph is given an error that says nothing of the work: it
/// counts as under way, and nothing that it touches is given up.
pub(super) fn answers_that_say_nothing_are_no_end() {
    let pair = Pair::<CudaTwinEnd>::new(MIB);
    for answer in ["stream 900", "context 901", "stream 1"] {
        pair.ours.write(0, &pattern(OUR_SEED, MIB));
        twin("KVFERRY_TWIN_ONCE", answer);
        let gate = Gate::close();
        let operation = pair.read_all();
        let early = operation.wait(Instant::now() + Duration::from_millis(100));
        assert!(!early.is_safe(), "{answer}: {early:?}");
        gate.open();
        done(&operation);
        assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
    }
    // An error that ends the context ends the work.
    twin("KVFERRY_TWIN_ONCE", "stream 719");
    let gate = Gate::close();
    let status = pair.read_all().wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cuda { code: 719, .. })), "{status:?}");
    gate.open();
}

/// The same for those who wait for a stream or a point of it.
pub(super) fn waiting_outlasts_answers_that_say_nothing() {
    let memory = CardMemory::new(MIB);
    let (stream, event) = (card().stream(true).unwrap(), card().event(false).unwrap());
    // SAFETY: the memory is kept until the stream has passed.
    let fill = || unsafe { stream.fill(memory.base(), 7, MIB as u64) }.unwrap();
    fill();
    stream.record(&event).unwrap();
    twin("KVFERRY_TWIN_ONCE", "event 900");
    assert_eq!(event.passed(), Ok(false));
    wait_until("the stream has passed", || event.passed().unwrap());
    twin("KVFERRY_TWIN_ONCE", "wait 900");
    fill();
    assert_eq!(stream.synchronize(), Ok(()));
    for (answer, wait) in [("event 700", false), ("wait 700", true)] {
        twin("KVFERRY_TWIN_ONCE", answer);
        let said = if wait { stream.synchronize() } else { event.passed().map(drop) };
        assert!(matches!(said, Err(Error::Cuda { code: 700, .. })), "{answer}: {said:?}");
    }
    stream.synchronize().unwrap();
}
