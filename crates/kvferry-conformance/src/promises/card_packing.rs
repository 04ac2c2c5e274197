//! What packing the memory of a card over NIXL and over `tcp` promises, beside what all packed reads do. On the stand-in
//! for a driver, which is told to be late, or to refuse.

use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Loops, Place, Region};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{Error, Operation, Status, Transport};

use super::packed::{carry_out, loops};
use super::twin::{Gate, twin};
use crate::back_end::{BackEnd, NixlTwinEnd, TcpEnd, TcpTwinEnd};
use crate::data::pattern;
use crate::memory::{CardMemory, Memory};
use crate::pair::{MIB, OUR_SEED, PEER_SEED, Pair, soon};
use crate::peer::{Peer, wait_until};

/// Reads packed. Answers how many of the bytes were.
fn exact<B: BackEnd>(pair: &Pair<B>) -> u64 {
    let loops = loops(pair, 512, 16, 300);
    let operation = pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
    let Status::Done(report) = operation.wait(soon()) else { panic!("{operation:?}") };
    let mut expected = pattern(OUR_SEED, pair.bytes);
    carry_out(pair, &loops, &pattern(PEER_SEED, pair.bytes), &mut expected);
    assert!(pair.ours.snapshot() == expected, "a packed read is not exact");
    report.packed
}

/// Kernels that take long: nobody reads what is not gathered yet, and nothing is done before it is in
/// place.
pub(super) fn kernels_that_are_late_are_waited_for<B: BackEnd>() {
    twin("KVFERRY_TWIN_LATE_MS", "30");
    let pair = Pair::<B>::new(8 * MIB);
    assert!(exact(&pair) > 0, "nothing was packed");
}

/// A question after a kernel that CUDA does not answer is asked again: the kernel is under way until then.
pub(super) fn answers_that_say_nothing_are_no_end<B: BackEnd>() {
    let pair = Pair::<B>::new(8 * MIB);
    twin("KVFERRY_TWIN_LATE_MS", "30");
    for answer in ["stream 900", "context 900"] {
        pair.ours.write(0, &pattern(OUR_SEED, pair.bytes));
        twin("KVFERRY_TWIN_ONCE", answer);
        assert!(exact(&pair) > 0, "nothing was packed");
    }
}

/// A read that is cancelled while kernels put bytes in their place is not safe before they have ended.
pub(super) fn kernels_in_flight_keep_the_destination<B: BackEnd>() {
    let bytes = 8 * MIB;
    let pair = Pair::<B>::new(bytes);
    let loops = loops(&pair, 512, 16, 300);
    let gate = Gate::close();
    let operation = pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
    // Our own: the peer's was started without a gate.
    gate.wait_for_a_kernel();
    operation.cancel();
    let status = operation.wait(Instant::now() + Duration::from_millis(200));
    assert!(matches!(status, Status::Quarantined(Error::Cancelled)), "{status:?}");
    gate.open();
    let status = operation.wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cancelled)), "{status:?}");
    let mark = vec![0xaa; bytes];
    pair.ours.write(0, &mark);
    std::thread::sleep(Duration::from_millis(1000));
    assert!(pair.ours.snapshot() == mark, "bytes landed after the destination was declared safe");
    wait_until("the slots are back", || pair.transport.staging().in_use == 0);
}

/// Cards that do not start kernels: every byte is read all the same, one by one, on either side.
pub(super) fn cards_that_refuse_are_read_directly() {
    let pair = Pair::<NixlTwinEnd>::new(8 * MIB);
    twin("KVFERRY_TWIN_REFUSES", "launch");
    assert_eq!(exact(&pair), 0);
    wait_until("the slots are back", || pair.transport.staging().in_use == 0);
    drop(pair);
    // The peer that is started now refuses, too.
    let pair = Pair::<NixlTwinEnd>::new(8 * MIB);
    twin("KVFERRY_TWIN_REFUSES", "nothing");
    assert_eq!(exact(&pair), 0);
}

/// A kernel that an error ends: the read fails, and nothing waits for ever.
pub(super) fn kernels_that_break_fail_the_read<B: BackEnd>() {
    let pair = Pair::<B>::new(8 * MIB);
    twin("KVFERRY_TWIN_REFUSES", "run");
    let loops = loops(&pair, 512, 16, 300);
    let operation = pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
    let status = operation.wait(soon());
    assert!(matches!(status, Status::Failed(Error::Cuda { .. })), "{status:?}");
    assert_eq!(pair.transport.statistics().quarantined, 0);
}

/// A card that cannot be given the kernel is read directly, and reads directly.
pub(super) fn cards_without_the_kernel_are_read_directly() {
    twin("KVFERRY_TWIN_REFUSES", "module");
    let pair = Pair::<NixlTwinEnd>::new(8 * MIB);
    assert_eq!(pair.transport.packs_below(&pair.peer), 0);
    assert_eq!(exact(&pair), 0);
}

/// A card for which there is no memory to tell kernels what to do is read directly, and reads directly.
pub(super) fn cards_without_memory_are_read_directly() {
    twin("KVFERRY_TWIN_REFUSES", "pinned");
    let pair = Pair::<NixlTwinEnd>::new(8 * MIB);
    assert_eq!(pair.transport.packs_below(&pair.peer), 0);
    assert_eq!(exact(&pair), 0);
}

/// Runs of one memory, in another order in the other.
fn across(from: u64, to: u64) -> Loops {
    let mut loops = Loops::default();
    let pairs = (0..200).map(|at| BlockPair { source: at, destination: 199 - at });
    let table = loops.add_table(pairs);
    let inner = Loop { count: 20, source: 200, destination: 100 };
    loops.add_nest((from, to), 100, (4000, 2000), &[inner], table).unwrap();
    loops
}

/// A card on one side, and the host's memory on the other.
pub(super) fn a_card_and_a_host_pack_for_each_other<C, H>()
where
    C: BackEnd<Memory = CardMemory>,
    H: BackEnd<Memory = HostMemory>,
{
    let theirs = pattern(PEER_SEED, MIB);
    let expected = |loops: &Loops, from: u64, to: u64| {
        let mut expected = vec![0; MIB];
        for copy in loops.copies() {
            let (from, to) = ((copy.source - from) as usize, (copy.destination - to) as usize);
            let bytes = copy.bytes as usize;
            expected[to..to + bytes].copy_from_slice(&theirs[from..from + bytes]);
        }
        expected
    };
    fn read<C: BackEnd, M: Memory>(process: &Peer, ours: &M) -> (Loops, Vec<u8>) {
        let transport = C::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        let loops = across(process.base, ours.base());
        assert!(transport.packs_below(&peer) > 0);
        let operation = transport.read_packed(&peer, &loops, soon()).unwrap();
        let Status::Done(report) = operation.wait(soon()) else { panic!("{operation:?}") };
        assert_eq!(report.packed, report.bytes);
        (loops, ours.snapshot())
    }
    let process = Peer::start::<C>(MIB, PEER_SEED);
    let ours: HostMemory = Memory::new(MIB);
    let (loops, found) = read::<C, _>(&process, &ours);
    assert!(found == expected(&loops, process.base, ours.base()), "card to host is not exact");
    let process = Peer::start::<H>(MIB, PEER_SEED);
    let ours: CardMemory = Memory::new(MIB);
    let (loops, found) = read::<C, _>(&process, &ours);
    assert!(found == expected(&loops, process.base, ours.base()), "host to card is not exact");
}

/// Memory of a card that is registered when the peer is known already is packed once the peer is connected to anew.
pub(super) fn cards_that_come_later_are_packed() {
    let process = Peer::start::<NixlTwinEnd>(MIB, PEER_SEED);
    let (host, card): (HostMemory, CardMemory) = (Memory::new(MIB), Memory::new(MIB));
    let transport = NixlTwinEnd::new().unwrap();
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(Memory::region(&host)) }.unwrap();
    let peer = transport.connect(&process.description, soon()).unwrap();
    let read = |to: u64| {
        let loops = across(process.base, to);
        let operation = transport.read_packed(&peer, &loops, soon()).unwrap();
        let Status::Done(report) = operation.wait(soon()) else { panic!("{operation:?}") };
        assert_eq!(report.packed, report.bytes, "{report:?}");
    };
    read(Memory::base(&host));
    // SAFETY: as above.
    unsafe { transport.register(card.region()) }.unwrap();
    transport.connect(&process.description, soon()).unwrap();
    assert!(transport.packs_below(&peer) > 0);
    read(card.base());
    drop(transport);
}

/// Over `tcp`, memory of a card goes through slots or not at all: where a card refuses, the read fails and says whose card
/// it was.
pub(super) fn cards_that_refuse_fail_the_read() {
    let read = |pair: &Pair<TcpTwinEnd>| {
        let loops = loops(pair, 512, 16, 300);
        let operation = pair.transport.read_packed(&pair.peer, &loops, soon()).unwrap();
        let Status::Failed(error) = operation.wait(soon()) else { panic!("{operation:?}") };
        error
    };
    let pair = Pair::<TcpTwinEnd>::new(8 * MIB);
    twin("KVFERRY_TWIN_REFUSES", "launch");
    let error = read(&pair);
    assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
    drop(pair);
    // The peer that is started now refuses.
    let pair = Pair::<TcpTwinEnd>::new(8 * MIB);
    twin("KVFERRY_TWIN_REFUSES", "nothing");
    let error = read(&pair).to_string();
    assert!(error.contains("the peer's GPU does not gather"), "{error}");
    wait_until("the slots are back", || pair.transport.staging().in_use == 0);
}

/// What is missing is said when memory is registered.
pub(super) fn cards_that_cannot_be_read_are_refused() {
    let memory: CardMemory = Memory::new(MIB);
    let host: HostMemory = Memory::new(MIB);
    let refused = |transport: &<TcpTwinEnd as BackEnd>::Transport, region| {
        // SAFETY: it is refused.
        unsafe { transport.register(region) }.unwrap_err().to_string()
    };
    for missing in ["module", "pinned"] {
        twin("KVFERRY_TWIN_REFUSES", missing);
        let transport = TcpTwinEnd::new().unwrap();
        let error = refused(&transport, memory.region());
        assert!(error.contains("CUDA error"), "{missing}: {error}");
    }
    twin("KVFERRY_TWIN_REFUSES", "nothing");
    let transport = TcpTwinEnd::new().unwrap();
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(memory.region()) }.unwrap();
    let error = refused(&transport, Memory::region(&host));
    assert!(error.contains("it has a region of Gpu(0) and is given one of Host"), "{error}");
    let other = Region { base: 1 << 40, bytes: 4096, place: Place::Gpu(1) };
    let error = refused(&transport, other);
    assert!(error.contains("it has regions of GPU 0 and is given one of GPU 1"), "{error}");
    drop(transport);
    let error = refused(&TcpEnd::new().unwrap(), memory.region());
    assert!(error.contains("this tcp transport was made for host memory"), "{error}");
}
