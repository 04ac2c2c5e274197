//! The one thread on which an agent's connections live.

use std::future::Future;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::error::Error;
use crate::panics::Watched;
use crate::wire::lookup::LOOKUPS;

/// Threads for calls that wait.
const BLOCKING: usize = 48;

/// So long from now; what is too far for a clock is as good as a year.
pub(crate) fn after(time: Duration) -> Instant {
    Instant::now() + time.min(Duration::from_secs(365 * 86_400))
}

/// Runs tasks on a thread of its own until it is dropped.
#[derive(Debug)]
pub(crate) struct Background {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub(crate) fn start(name: &str) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::Io {
            what: "starting the agent's thread".to_owned(),
            kind: error.kind(),
        };
        // Blocking calls are rare: compiling plans, connecting transports and ending connections; and names, which are
        // looked up on threads beside those.
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING + LOOKUPS)
            .thread_name(name)
            .build()
            .map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                _ = runtime.block_on(stopped);
                runtime.shutdown_timeout(Duration::from_secs(1));
            })
            .map_err(failed)?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: F) {
        self.handle.spawn(async move {
            // Loads hear of their own; of the others the log must say that nobody does their work any more.
            let _watched = Watched::new("a task of the agent", |_| ());
            task.await;
        });
    }

    /// Ends all tasks. Idempotent.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}
