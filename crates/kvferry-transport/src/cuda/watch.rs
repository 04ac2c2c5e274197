//! The thread that notices the end of launches nobody asks about.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::flight::Flight;
use crate::contract::Error;

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
    closing: bool,
}

impl Watch {
    pub(super) fn start() -> Result<Self, Error> {
        let shared = Arc::<Shared>::default();
        let thread = std::thread::Builder::new().name("kvferry-cuda".to_owned()).spawn({
            let shared = shared.clone();
            move || shared.watch()
        });
        let thread = thread.map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn add(&self, flight: Arc<Flight>) {
        let mut watched = self.shared.watched.lock();
        watched.flights.push(flight);
        if watched.flights.len() == 1 {
            self.shared.changed.notify_one();
        }
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
    /// It is in no hurry: whoever waits asks the card, and should not find it busy with answering here.
    fn watch(&self) {
        loop {
            let mut watched = self.watched.lock();
            while watched.flights.is_empty() && !watched.closing {
                self.changed.wait(&mut watched);
            }
            if watched.flights.is_empty() {
                return;
            }
            drop(watched);
            std::thread::sleep(Duration::from_millis(1));
            let flights = self.watched.lock().flights.clone();
            let landed: Vec<bool> = flights.iter().map(|flight| flight.landed()).collect();
            let mut landed = landed.into_iter();
            // New ones were added at the end.
            self.watched.lock().flights.retain(|_| !landed.next().unwrap_or(false));
        }
    }
}
