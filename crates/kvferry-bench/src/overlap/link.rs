//! A link of a given rate: reads arrive when such a link would have carried their bytes, one after the
//! other, and not before.

use std::sync::Arc;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvferry_agent::{Carrier, Source};
use kvferry_transport::{Error, Loops, Operation, Status};

/// What all reads of one engine share.
#[derive(Debug)]
pub(super) struct Link(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Bytes per second; `None`: no limit.
    rate: Option<f64>,
    /// When all that was asked for so far is through.
    free: Instant,
}

impl Link {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { rate: None, free: Instant::now() })))
    }

    /// From now on.
    pub(super) fn limit(&self, rate: Option<f64>) {
        *self.lock() = State { rate, free: Instant::now() };
    }

    /// When so many bytes more are through.
    fn carry(&self, bytes: u64) -> Instant {
        let mut state = self.lock();
        let time = state.rate.map_or(Duration::ZERO, |rate| {
            Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX)
        });
        state.free = state.free.max(Instant::now()) + time.min(Duration::from_secs(86_400));
        state.free
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A transport behind a link.
#[derive(Debug)]
pub(super) struct Limited {
    pub(super) inner: Arc<dyn Carrier>,
    pub(super) link: Arc<Link>,
}

impl Carrier for Limited {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        self.inner.describe()
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error> {
        let source = self.inner.connect(description, deadline)?;
        Ok(Box::new(Behind { source, link: self.link.clone() }))
    }
}

#[derive(Debug)]
struct Behind {
    source: Box<dyn Source>,
    link: Arc<Link>,
}

impl Source for Behind {
    fn read(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        let operation = self.source.read(loops, deadline)?;
        Ok(Box::new(Held { operation, due: self.link.carry(loops.bytes()) }))
    }

    fn disconnect(&self) {
        self.source.disconnect();
    }
}

#[derive(Debug)]
struct Held {
    operation: Box<dyn Operation>,
    due: Instant,
}

impl Operation for Held {
    fn poll(&self) -> Status {
        match self.operation.poll() {
            Status::Done(_) if Instant::now() < self.due => Status::InProgress,
            status => status,
        }
    }

    fn wait(&self, until: Instant) -> Status {
        if let Status::Done(_) = self.operation.wait(until) {
            sleep(self.due.min(until).saturating_duration_since(Instant::now()));
        }
        self.poll()
    }

    fn cancel(&self) {
        self.operation.cancel();
    }
}
