//! Where an operation begins.

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvferry_layout::{ByteCopy, Loops, Place, Region};

use super::counters::Counters;
use super::custody::{Custody, Interrupt, Order};
use super::deadlines::Deadlines;
use super::rate::RateWatch;
use super::region::Regions;
use super::spans::Spans;
use crate::contract::{Error, RegionId, Side, Statistics};

/// What every back end has: its regions, its counters, and the thread that keeps deadlines.
#[derive(Debug)]
pub struct Admission {
    pub regions: Arc<Regions>,
    counters: Arc<Counters>,
    deadlines: Deadlines,
}

/// An operation that may be carried out.
#[derive(Debug)]
pub struct Opened {
    pub custody: Arc<Custody>,
    /// What there is to copy, checked and merged.
    pub copies: Vec<ByteCopy>,
    /// Whether any of it goes to a GPU.
    pub on_gpu: bool,
}

/// An operation that is carried out in one go, however many copies were asked for.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    pub asked: u64,
    pub bytes: u64,
    pub began: Instant,
}

impl Whole {
    /// What loops amount to from now on, and the spans (address, bytes) that they write.
    pub fn of(loops: &Loops) -> Result<(Self, Vec<(u64, u64)>), Error> {
        let began = Instant::now();
        let written = loops.nests().map(|nest| {
            let (address, bytes) = (nest.destination, nest.run);
            let outside = Error::OutsideRegion { side: Side::Local, address, bytes };
            let (_, written) = nest.extents().ok_or(outside)?;
            Ok((written.start, written.end - written.start))
        });
        let written = written.collect::<Result<_, Error>>()?;
        Ok((Self { asked: loops.runs(), bytes: loops.bytes(), began }, written))
    }
}

impl Admission {
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            regions: Arc::default(),
            counters: Arc::default(),
            deadlines: Deadlines::start()?,
        })
    }

    /// Registers a region for a back end that only knows host memory.
    pub fn insert_host(&self, name: &str, region: Region) -> Result<RegionId, Error> {
        match region.place {
            Place::Host => self.regions.insert(region),
            Place::Gpu(n) => Err(Error::Unsupported(format!(
                "the {name} transport moves host memory only, not that of GPU {n}: use nixl"
            ))),
        }
    }

    /// Makes a list of what loops copy from the peer's memory (`theirs`) into registered memory of this process,
    /// and opens an operation for it. Whoever calls carries it out; one without bytes is done already.
    pub fn open(
        &self,
        loops: &Loops,
        theirs: &Spans,
        deadline: Instant,
        interrupt: Option<Weak<dyn Interrupt>>,
        rate: &Arc<RateWatch>,
    ) -> Result<Opened, Error> {
        let runs = (loops.runs(), loops.copies());
        self.open_listed(runs, theirs, deadline, interrupt, rate, &self.counters)
    }

    /// The same of copies that are a part of another operation, which is counted by itself.
    pub fn open_uncounted(
        &self,
        copies: &[ByteCopy],
        theirs: &Spans,
        deadline: Instant,
        rate: &Arc<RateWatch>,
    ) -> Result<Opened, Error> {
        let runs = (copies.len() as u64, copies.iter().copied());
        self.open_listed(runs, theirs, deadline, None, rate, &Arc::default())
    }

    fn open_listed(
        &self,
        (asked, runs): (u64, impl Iterator<Item = ByteCopy>),
        theirs: &Spans,
        deadline: Instant,
        interrupt: Option<Weak<dyn Interrupt>>,
        rate: &Arc<RateWatch>,
        counters: &Arc<Counters>,
    ) -> Result<Opened, Error> {
        let began = Instant::now();
        let admitted = self.regions.admit(runs, theirs)?;
        let custody = self.begin(Order {
            asked,
            copies: admitted.copies.len() as u64,
            bytes: admitted.copies.iter().map(|copy| copy.bytes).sum(),
            holds: admitted.holds,
            deadline,
            began,
            interrupt,
            counters: counters.clone(),
            rate: rate.clone(),
        });
        Ok(Opened { custody, copies: admitted.copies, on_gpu: admitted.on_gpu })
    }

    /// Opens an operation that is not a list of copies. What it reads, the caller has checked; what
    /// it writes (address, bytes) is checked here.
    pub fn open_whole(
        &self,
        whole: &Whole,
        written: &[(u64, u64)],
        deadline: Instant,
        interrupt: Option<Weak<dyn Interrupt>>,
        rate: &Arc<RateWatch>,
    ) -> Result<Arc<Custody>, Error> {
        let holds = self.regions.hold(written)?;
        Ok(self.begin(Order {
            asked: whole.asked,
            copies: u64::from(whole.bytes > 0),
            bytes: whole.bytes,
            holds,
            deadline,
            began: whole.began,
            interrupt,
            counters: self.counters.clone(),
            rate: rate.clone(),
        }))
    }

    fn begin(&self, order: Order) -> Arc<Custody> {
        let custody = Custody::open(order);
        if !custody.is_empty() {
            self.deadlines.watch(&custody);
        }
        custody
    }

    pub fn statistics(&self) -> Statistics {
        self.counters.read()
    }
}
