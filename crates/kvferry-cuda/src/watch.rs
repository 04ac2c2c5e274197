//! The thread that notices the end of launches nobody asks about.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::read_launch::ReadLaunch;
use kvferry_transport::Error;
use kvferry_transport::shared::thread::{outlive, unless_it_panics};

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
    launches: Vec<Arc<ReadLaunch>>,
    asleep: bool,
    closing: bool,
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

    pub(super) fn add(&self, launch: Arc<ReadLaunch>) {
        let mut watched = self.shared.watched.lock();
        watched.launches.push(launch);
        if watched.asleep {
            self.shared.changed.notify_one();
        }
    }

    /// What is under way.
    pub(super) fn launches(&self) -> Vec<Arc<ReadLaunch>> {
        self.shared.watched.lock().launches.clone()
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
            idle = if watched.launches.is_empty() { idle + 1 } else { 0 };
            // Requests come in bursts: to wake this thread for each would cost its caller microseconds.
            while idle > STAYS_AWAKE && watched.launches.is_empty() && !watched.closing {
                watched.asleep = true;
                self.changed.wait(&mut watched);
                watched.asleep = false;
            }
            if watched.closing && watched.launches.is_empty() {
                return;
            }
            drop(watched);
            std::thread::sleep(PERIOD);
            let launches = self.watched.lock().launches.clone();
            // One that panics is left to those who poll it.
            let look = |launch: &Arc<ReadLaunch>| {
                unless_it_panics("a launch", || launch.landed_or_lost()).unwrap_or(true)
            };
            let landed: Vec<bool> = launches.iter().map(look).collect();
            let mut landed = landed.into_iter();
            // New ones were added at the end.
            self.watched.lock().launches.retain(|_| !landed.next().unwrap_or(false));
        }
    }
}
