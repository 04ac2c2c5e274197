//! Connections on their way out. To end one may take seconds: threads are joined, memory is unmapped. So that is
//! done aside, and an engine is connected to anew only when nothing of an earlier connection is left: transports
//! take the two for one.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::carrier::Source;
use crate::wire::ticket::Incarnation;

/// The engine that a connection leads to: where it was found, and in which of its lives.
pub(super) type Whose = (Arc<str>, Incarnation);

/// What is on its way out, or may still have to go.
#[derive(Debug)]
pub(super) struct Departures {
    /// Where there are threads that may wait.
    aside: Handle,
    under_way: Mutex<Vec<Whose>>,
    over: Notify,
}

/// Something that is under way, until this is dropped.
#[derive(Debug)]
struct Entry {
    departures: Arc<Departures>,
    whose: Whose,
}

impl Departures {
    pub(super) fn new(aside: Handle) -> Arc<Self> {
        Arc::new(Self { aside, under_way: Mutex::default(), over: Notify::new() })
    }

    fn enter(self: &Arc<Self>, whose: &Whose) -> Entry {
        self.under_way.lock().push(whose.clone());
        Entry { departures: self.clone(), whose: whose.clone() }
    }

    /// Ends connections to an engine, aside. They end, whatever becomes of this.
    pub(super) fn leave(
        self: &Arc<Self>,
        whose: &Whose,
        sources: Arc<Vec<Option<Box<dyn Source>>>>,
    ) {
        let entry = self.enter(whose);
        self.aside.spawn_blocking(move || {
            // Dropped last, also where a transport panics.
            let _entry = entry;
            sources.iter().flatten().for_each(|source| source.disconnect());
            drop(sources);
        });
    }

    /// Waits until nothing is left of earlier connections to an engine, at its address or in the same life.
    pub(super) async fn over(&self, (address, life): &Whose) {
        loop {
            let notified = self.over.notified();
            let left = |(at, in_life): &Whose| at == address || in_life == life;
            if !self.under_way.lock().iter().any(left) {
                return;
            }
            notified.await;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut under_way = self.departures.under_way.lock();
        if let Some(at) = under_way.iter().position(|whose| *whose == self.whose) {
            under_way.swap_remove(at);
        }
        drop(under_way);
        self.departures.over.notify_waiters();
    }
}

/// A connection that may come too late for whoever wanted it: what nobody [takes](Self::take) is ended aside.
pub(super) struct Arrival {
    source: Option<Box<dyn Source>>,
    entry: Entry,
}

impl Arrival {
    /// Before it is connected to: until then, whoever connects anew waits.
    pub(super) fn new(departures: &Arc<Departures>, whose: &Whose) -> Self {
        Self { source: None, entry: departures.enter(whose) }
    }

    pub(super) fn with(mut self, source: Box<dyn Source>) -> Self {
        self.source = Some(source);
        self
    }

    pub(super) fn take(mut self) -> Option<Box<dyn Source>> {
        self.source.take()
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(source) = self.source.take() {
            self.entry.departures.leave(&self.entry.whose, Arc::new(vec![Some(source)]));
        }
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}
