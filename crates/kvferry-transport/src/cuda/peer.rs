//! Peers of the cuda back end, and their memory as this process sees it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use kvferry_layout::{Place, Price, Region};
use parking_lot::Mutex;

use super::driver::Card;
use super::share::{self, Description, Exports, Opened};
use crate::contract::{Error, Instance};
use crate::shared::rate::{Medium, RateWatch};
use crate::shared::spans::Spans;

/// What a read takes where it was not measured: as it was within one H200, November 2026.
pub(super) const USUAL: Price = Price { launch: 10_000.0, copy: 0.1, byte: 1.0 / 1500.0 };

/// A peer of a [`Cuda`](super::Cuda) transport.
#[derive(Clone)]
pub struct CudaPeer(Arc<Inner>);

struct Inner {
    instance: [u8; 16],
    pid: u32,
    rate: Arc<RateWatch>,
    /// Once it is measured.
    price: OnceLock<Price>,
    /// `None` once disconnected.
    table: Mutex<Option<Arc<Table>>>,
}

impl CudaPeer {
    /// Opens the memory that a description names.
    pub(super) fn open(card: &Card, description: &Description) -> Result<Self, Error> {
        let table = Arc::new(Table::open(card, description, None)?);
        Ok(Self(Arc::new(Inner {
            instance: description.instance,
            pid: description.pid,
            rate: Arc::new(RateWatch::new(Medium::Cards)),
            price: OnceLock::new(),
            table: Mutex::new(Some(table)),
        })))
    }

    /// Brings it up to date: what the description still names stays open, what it does not name any more is closed,
    /// unless a kernel still reads it: then when that has ended.
    pub(super) fn refresh(&self, card: &Card, description: &Description) -> Result<(), Error> {
        let before = self.table();
        let table = Table::open(card, description, before.as_deref())?;
        *self.0.table.lock() = Some(Arc::new(table));
        Ok(())
    }

    /// Closes its memory, unless a kernel still reads it: then when that has ended.
    pub(super) fn close(&self) {
        let table = self.0.table.lock().take();
        drop(table);
    }

    /// Who it is.
    pub fn instance(&self) -> Instance {
        Instance(self.0.instance)
    }

    pub(super) fn table(&self) -> Option<Arc<Table>> {
        self.0.table.lock().clone()
    }

    /// Measures what reads from it take. Nobody waits for that: until then it takes what is usual.
    pub(super) fn measure(&self, measure: impl FnOnce(&Arc<Table>) -> Price) {
        if let Some(table) = self.table() {
            let _ = self.0.price.set(measure(&table));
        }
    }

    /// What reads from it take.
    pub(super) fn price(&self) -> Price {
        self.0.price.get().copied().unwrap_or(USUAL)
    }

    pub(super) fn rate(&self) -> &Arc<RateWatch> {
        &self.0.rate
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for CudaPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPeer")
            .field("instance", &self.instance())
            .field("pid", &self.0.pid)
            .finish_non_exhaustive()
    }
}

/// The transports of this process and what they have registered: their memory needs no opening.
pub(super) static OWN: Mutex<BTreeMap<[u8; 16], Arc<Exports>>> = Mutex::new(BTreeMap::new());

/// A peer's regions, open here.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) spans: Spans,
    /// For each of them: what to add to the peer's addresses.
    pub(super) shifts: Vec<u64>,
    opened: Vec<Arc<Opened>>,
}

impl Table {
    fn open(card: &Card, description: &Description, before: Option<&Self>) -> Result<Self, Error> {
        let own = OWN.lock().get(&description.instance).cloned();
        let place = Place::Gpu(card.ordinal());
        let before = before.map_or(&[][..], |table| &table.opened);
        let (mut opened, mut regions) = (vec![], vec![]);
        for foreign in &description.regions {
            let region = Region { base: foreign.base, bytes: foreign.bytes, place };
            let shift = match &own {
                Some(exports) => exports.hold(&region).map(|()| 0),
                None => share::open(card, description, foreign, before, &mut opened),
            };
            regions.push((region, shift?));
        }
        regions.sort_unstable_by_key(|(region, _)| region.base);
        let spans = Spans::from_peer(regions.iter().map(|(region, _)| *region).collect())?;
        let shifts = regions.into_iter().map(|(_, shift)| shift).collect();
        Ok(Self { spans, shifts, opened })
    }
}
