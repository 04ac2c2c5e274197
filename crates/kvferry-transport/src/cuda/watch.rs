//! The thread that notices the end of launches nobody asks about.

use std::any::Any;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::errand::Errand;
use super::flight::Flight;
use crate::contract::Error;
use crate::shared::thread::{outlive, unless_it_panics};

const PERIOD: Duration = Duration::from_millis(1);
/// So many periods after the last launch.
const STAYS_AWAKE: u32 = 20;

#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    watched: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Watched {
    flights: Vec<Arc<Flight>>,
    /// Errands that took too long for whoever waited, and what they may still touch.
    strays: Vec<(Errand, Box<dyn Any + Send>)>,
    asleep: bool,
    closing: bool,
}

impl Watched {
    fn is_empty(&self) -> bool {
        self.flights.is_empty() && self.strays.is_empty()
    }
}

impl Watch {
    pub(super) fn start() -> Result<Self, Error> {
        let shared = Arc::<Shared>::default();
        let thread = std::thread::Builder::new().name("kvferry-cuda".to_owned()).spawn({
            let shared = shared.clone();
            move || outlive("the watch over launches", || shared.watch())
        });
        let thread = thread.map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn add(&self, flight: Arc<Flight>) {
        let mut watched = self.shared.watched.lock();
        watched.flights.push(flight);
        if watched.asleep {
            self.shared.changed.notify_one();
        }
    }

    /// Keeps something until an errand has ended that nobody waits for any more.
    pub(super) fn keep(&self, errand: Errand, touched: Box<dyn Any + Send>) {
        self.shared.watched.lock().strays.push((errand, touched));
        self.shared.changed.notify_one();
    }

    /// What is under way.
    pub(super) fn flights(&self) -> Vec<Arc<Flight>> {
        self.shared.watched.lock().flights.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.watched.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// It is in no hurry: whoever waits looks at the signal.
    fn watch(&self) {
        let mut idle = 0;
        loop {
            let mut watched = self.watched.lock();
            idle = if watched.is_empty() { idle + 1 } else { 0 };
            // Requests come in bursts: to wake this thread for each would cost its caller microseconds.
            while idle > STAYS_AWAKE && watched.is_empty() && !watched.closing {
                watched.asleep = true;
                self.changed.wait(&mut watched);
                watched.asleep = false;
            }
            if watched.closing && watched.is_empty() {
                return;
            }
            drop(watched);
            std::thread::sleep(PERIOD);
            let flights = {
                let mut watched = self.watched.lock();
                let ended = |stray: &mut (Errand, _)| stray.0.outcome().is_some();
                let ended: Vec<_> = watched.strays.extract_if(.., ended).collect();
                let flights = watched.flights.clone();
                drop(watched);
                // To give memory back may take as long as whatever the card is doing.
                drop(ended);
                flights
            };
            // One that panics is left to those who poll it.
            let look = |flight: &Arc<Flight>| {
                unless_it_panics("a launch", || flight.landed_or_lost()).unwrap_or(true)
            };
            let landed: Vec<bool> = flights.iter().map(look).collect();
            let mut landed = landed.into_iter();
            // New ones were added at the end.
            self.watched.lock().flights.retain(|_| !landed.next().unwrap_or(false));
        }
    }
}
