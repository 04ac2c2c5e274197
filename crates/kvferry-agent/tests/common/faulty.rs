//! A transport that does wrong on purpose, over one that does right.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvferry_agent::{Carrier, Source};
use kvferry_digest::{Digest, Program};
use kvferry_layout::BlockPair;
use kvferry_transport::{ByteCopy, Error, Loops, Operation, Status};

/// What goes wrong on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A bit of what landed is another.
    FlippedBit,
    /// What belongs in one block lands in another, and the other way round.
    SwappedBlocks,
    /// A copy is left out: what the block held before is still there.
    MissingCopy,
    /// A block is read that holds something older.
    StaleBlock,
    /// The values inside of a page are in another order.
    OtherOrder,
    /// None of the bytes: the source says that it packs, and does not when it is asked to.
    Unpacked,
    /// It panics when it is asked to read.
    PanicsReading,
    /// It panics when it is asked how far a read is.
    PanicsLooking,
    /// It panics when it is connected to.
    PanicsConnecting,
}

/// The fault that is at work, if any.
pub type Switch = Arc<Mutex<Option<Fault>>>;

pub struct Faulty {
    pub inner: Arc<dyn Carrier>,
    pub switch: Switch,
    /// How far from a block another one is that holds something older.
    pub older: u64,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Carrier for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        self.inner.describe()
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error> {
        let fault = *self.switch.lock().unwrap();
        assert_ne!(fault, Some(Fault::PanicsConnecting), "as a test wants it");
        let inner = self.inner.connect(description, deadline)?;
        Ok(Box::new(FaultySource { inner, switch: self.switch.clone(), older: self.older }))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        self.inner.digest(program, deadline)
    }
}

/// Copies that have nothing in common, as loops.
fn one_by_one(copies: &[ByteCopy]) -> Loops {
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    for copy in copies {
        let start = (copy.source, copy.destination);
        loops.add_nest(start, copy.bytes, (0, 0), &[], table).unwrap();
    }
    loops
}

#[derive(Debug)]
struct FaultySource {
    inner: Box<dyn Source>,
    switch: Switch,
    older: u64,
}

impl Source for FaultySource {
    fn read(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        let fault = *self.switch.lock().unwrap();
        assert_ne!(fault, Some(Fault::PanicsReading), "as a test wants it");
        let mut copies: Vec<ByteCopy> = loops.copies().collect();
        let last = copies.len() - 1;
        match fault {
            Some(Fault::SwappedBlocks) => {
                assert_eq!(copies[0].bytes, copies[last].bytes);
                let (first, other) = (copies[0].source, copies[last].source);
                assert_ne!(first, other);
                (copies[0].source, copies[last].source) = (other, first);
            }
            Some(Fault::MissingCopy) => {
                assert_ne!(last, 0);
                copies.remove(0);
            }
            Some(Fault::StaleBlock) => copies[0].source += self.older,
            Some(_) | None => {}
        }
        let inner = self.inner.read(&one_by_one(&copies), deadline)?;
        let done = AtomicBool::new(false);
        Ok(Box::new(FaultyOperation { inner, fault, first: copies[0], done }))
    }

    fn packs_below(&self) -> u64 {
        if *self.switch.lock().unwrap() == Some(Fault::Unpacked) { u64::MAX } else { 0 }
    }

    fn disconnect(&self) {
        self.inner.disconnect();
    }
}

#[derive(Debug)]
struct FaultyOperation {
    inner: Box<dyn Operation>,
    fault: Option<Fault>,
    first: ByteCopy,
    done: AtomicBool,
}

impl FaultyOperation {
    fn spoil(&self, status: Status) -> Status {
        assert_ne!(self.fault, Some(Fault::PanicsLooking), "as a test wants it");
        if !matches!(status, Status::Done(_)) || self.done.swap(true, Ordering::SeqCst) {
            return status;
        }
        let at = |byte: u64| (self.first.destination + byte) as *mut u8;
        // SAFETY: plans name only addresses of test memory, which is never freed and accessed without
        // references; the read is over.
        unsafe {
            match self.fault {
                Some(Fault::FlippedBit) => at(5).write_volatile(at(5).read_volatile() ^ 0x40),
                Some(Fault::OtherOrder) => {
                    let first = at(0).read_volatile();
                    let other =
                        (1..self.first.bytes).find(|&byte| at(byte).read_volatile() != first);
                    let other = other.expect("not all values are alike");
                    at(0).write_volatile(at(other).read_volatile());
                    at(other).write_volatile(first);
                }
                _ => {}
            }
        }
        status
    }
}

impl Operation for FaultyOperation {
    fn poll(&self) -> Status {
        self.spoil(self.inner.poll())
    }

    fn wait(&self, until: Instant) -> Status {
        self.spoil(self.inner.wait(until))
    }

    fn cancel(&self) {
        self.inner.cancel();
    }
}
