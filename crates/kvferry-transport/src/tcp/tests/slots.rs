//! What goes through slots, as the memory of a card does: with an engine of our own, which does nothing before it is let.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loops, Place, Region};

use super::super::frame::{Request, Verb};
use super::super::{Bounds, Encrypt, Packs, Tcp, TcpOptions, gather, parse};
use super::packed::greeted;
use super::soon;
use crate::contract::{Error, Operation, Status, Transport};
use crate::memory::HostMemory;
use crate::shared::digests::CardDigest;
use crate::shared::packing_area::{Cards, CopyEngine, Launched, PackingArea};
use crate::shared::staging::Staging;
use crate::shared::walk;

const BYTES: usize = 1 << 20;

/// A card whose memory is the host's.
#[derive(Debug, Default)]
struct Card {
    /// Nothing that is started ends before this is set.
    lets: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Engine(Arc<AtomicBool>);

#[derive(Debug)]
struct Launch(Loops, Arc<AtomicBool>);

impl Cards for Card {
    fn open(&self, gpu: u32, bytes: u64, slot_bytes: u64) -> Result<PackingArea, Error> {
        let memory = HostMemory::new(bytes as usize).unwrap();
        let region = Region { place: Place::Gpu(gpu), ..memory.region() };
        let staging = Staging::over(region, slot_bytes, Some(Box::new(memory)));
        Ok(PackingArea::new(staging, Some(Arc::new(Engine(self.lets.clone())))))
    }

    fn digests(&self) -> &dyn CardDigest {
        unreachable!("nobody looks")
    }
}

impl CopyEngine for Engine {
    unsafe fn start(&self, loops: &Loops) -> Result<Box<dyn Launched>, Error> {
        Ok(Box::new(Launch(loops.clone(), self.0.clone())))
    }
}

impl Launched for Launch {
    fn outcome(&self) -> Option<Result<(), Error>> {
        self.1.load(Ordering::SeqCst).then(|| {
            // SAFETY: as `CopyEngine::start` demands; done again and again, it writes the same.
            unsafe { walk::carry_out(&self.0) };
            Ok(())
        })
    }

    fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        while self.outcome().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.outcome()
    }
}

struct End {
    transport: Tcp,
    memory: HostMemory,
    lets: Arc<AtomicBool>,
}

fn end(fill: u8, bounds: Bounds) -> End {
    end_with(fill, bounds, Encrypt::default())
}

fn end_with(fill: u8, bounds: Bounds, encrypt: Encrypt) -> End {
    let memory = HostMemory::new(BYTES).unwrap();
    memory.write(0, &vec![fill; BYTES]);
    let card = Card::default();
    let lets = card.lets.clone();
    let options = TcpOptions { cards: Some(Arc::new(card)), encrypt, ..TcpOptions::default() };
    let transport = Tcp::with(options, bounds, Arc::new(AtomicU64::new(0))).unwrap();
    let region = Region { place: Place::Gpu(0), ..memory.region() };
    // SAFETY: the transport is dropped before the memory, in the order of the fields; the memory is only touched through its
    // address.
    unsafe { transport.register(region) }.unwrap();
    End { transport, memory, lets }
}

/// The first half of all bytes.
fn half(from: u64, to: u64) -> Loops {
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    loops.add_nest((from, to), BYTES as u64 / 2, (0, 0), &[], table).unwrap();
    loops
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_read_is_in_place_when_the_card_says_so() {
    for encrypt in [Encrypt::Never, Encrypt::Always] {
        in_place_when_the_card_says_so(encrypt);
    }
}

fn in_place_when_the_card_says_so(encrypt: Encrypt) {
    let ends = [7, 1].map(|fill| end_with(fill, Bounds::of_this_process(), encrypt));
    let [source, reader] = ends;
    source.lets.store(true, Ordering::SeqCst);
    let peer = reader.transport.connect(&source.transport.describe().unwrap(), soon()).unwrap();
    let loops = half(source.memory.base(), reader.memory.base());
    let operation = reader.transport.read(&peer, &loops, soon()).unwrap();
    wait_until("nothing arrives", || reader.transport.staging().in_use > 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(operation.poll(), Status::InProgress);
    reader.lets.store(true, Ordering::SeqCst);
    let Status::Done(report) = operation.wait(soon()) else { panic!("{operation:?}") };
    assert_eq!((report.bytes, report.packed), (BYTES as u64 / 2, BYTES as u64 / 2));
    let expected = [vec![7; BYTES / 2], vec![1; BYTES / 2]].concat();
    assert!(reader.memory.snapshot() == expected);
    let empty = || reader.transport.staging().in_use + source.transport.staging().in_use == 0;
    wait_until("a slot never came back", empty);
}

/// A slot that is filled while its reader has begun to ask for more, and says no more, comes back.
#[test]
fn who_stops_in_the_middle_of_a_request_keeps_no_slot() {
    use std::io::Write;
    let bounds = Bounds { sending: Duration::from_millis(300), ..Bounds::of_this_process() };
    let source = end(7, bounds);
    let mut stops = greeted(&source.transport);
    let mut body = vec![];
    let loops = half(source.memory.base(), 0);
    gather::encode(&loops, &mut body);
    let (spans, bytes) = (body.len() as u32, loops.packed_bytes().unwrap());
    let header = Request { verb: Verb::Gather, spans, id: 1, bytes }.encode();
    stops.ask(&[&header[..], &body].concat());
    // The length of a frame, and not all of it.
    stops.stream().write_all(&[24, 0, 0, 0, 7]).unwrap();
    wait_until("nothing is gathered", || source.transport.staging().in_use > 0);
    source.lets.store(true, Ordering::SeqCst);
    wait_until("a slot never came back", || source.transport.staging().in_use == 0);
    drop(stops);
}

/// What a description says of slots is believed within bounds alone.
#[test]
fn slots_that_nobody_has_are_refused() {
    let source = end(7, Bounds::of_this_process());
    let described = source.transport.describe().unwrap();
    let slot = source.transport.areas.card().unwrap().1.staging.slot_bytes();
    assert_eq!(parse(&described).unwrap().packs, Some(Packs { slot, on_card: true }));
    let at = described.len() - 9;
    for (slot, on_card) in [
        (0, 1),
        (gather::SLOT_BYTES - 1, 1),
        (gather::MOST_PACKED + 1, 1),
        (u64::MAX, 1),
        (gather::SLOT_BYTES + 1, 0),
        (gather::SLOT_BYTES, 2),
    ] {
        let mut other = described.clone();
        other[at..at + 8].copy_from_slice(&slot.to_le_bytes());
        other[at + 8] = on_card;
        assert!(matches!(parse(&other), Err(Error::BadDescription(_))), "{slot} {on_card}");
    }
}
