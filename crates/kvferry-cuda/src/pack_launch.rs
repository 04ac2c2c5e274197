//! One launch that nobody but its caller waits for.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::driver::{OnCard, Pinned, Stream};
use super::landing::Landing;
use super::launch_queue::{Extent, LaunchQueue};
use super::program::{Ends, Program};
use super::signal::Signal;
use kvferry_transport::Error;
use kvferry_transport::shared::packing_area::Launched;

/// Loops that a card carries out.
#[derive(Clone, Debug)]
pub(crate) struct PackLaunch(Arc<Launch>);

impl PackLaunch {
    /// Launches the kernel for a program. After an error nothing of it runs.
    ///
    /// # Safety
    ///
    /// All addresses in the program must stay valid until the launch has ended, and the launch itself must be
    /// kept until then.
    pub(super) unsafe fn start(
        line: &Mutex<LaunchQueue>,
        program: &Program<'_>,
        extent: Extent,
        awake: Duration,
    ) -> Result<Self, Error> {
        let mut line = line.lock();
        let (signal, stream) = line.tidings()?;
        let ends = signal.ends();
        let state = Mutex::new(State::Aloft { signal, stream, kept: None });
        let launch = Arc::new(Launch { ends, state, awake });
        let landing: Arc<dyn Landing> = launch.clone();
        // SAFETY: the caller's promise.
        unsafe { line.start(program, extent, &landing) };
        drop(line);
        match launch.outcome() {
            Some(Err(error)) => Err(error),
            _ => Ok(Self(launch)),
        }
    }
}

impl Launched for PackLaunch {
    fn outcome(&self) -> Option<Result<(), Error>> {
        self.0.outcome_or_lost()
    }

    fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        let awake = Instant::now() + self.0.awake;
        loop {
            if let Some(outcome) = self.0.outcome() {
                return Some(outcome);
            }
            let now = Instant::now();
            if now < awake {
                std::thread::yield_now();
                continue;
            }
            match self.outcome() {
                None if now < until => std::thread::sleep(Duration::from_micros(100)),
                outcome => return outcome,
            }
        }
    }
}

struct Launch {
    /// How long who waits does not sleep: a sleep is never shorter than some 60 µs.
    awake: Duration,
    ends: Ends,
    state: Mutex<State>,
}

enum State {
    /// What the kernel touches beside the loops' own memory, kept until it has ended.
    Aloft {
        signal: Signal,
        stream: Arc<Stream>,
        kept: Option<(Pinned, OnCard)>,
    },
    Ended(Result<(), Error>),
}

impl Launch {
    fn outcome(&self) -> Option<Result<(), Error>> {
        let mut state = self.state.lock();
        if let State::Aloft { signal, .. } = &*state
            && signal.is_set()
        {
            *state = State::Ended(Ok(()));
        }
        match &*state {
            State::Aloft { .. } => None,
            State::Ended(outcome) => Some(outcome.clone()),
        }
    }

    /// Like [`outcome`](Self::outcome), and asks the card whether anything went wrong: a kernel that was
    /// ended by an error says nothing.
    fn outcome_or_lost(&self) -> Option<Result<(), Error>> {
        let stream = match &*self.state.lock() {
            State::Aloft { stream, .. } => stream.clone(),
            State::Ended(outcome) => return Some(outcome.clone()),
        };
        let error = match stream.has_ended() {
            Ok(false) => return self.outcome(),
            Ok(true) => Error::Library("a kernel ended without saying so".to_owned()),
            // The context is broken: nothing of it runs any more.
            Err(error) => error,
        };
        self.outcome().or_else(|| {
            self.refused(error.clone());
            Some(Err(error))
        })
    }
}

impl Landing for Launch {
    fn ends(&self) -> Ends {
        self.ends
    }

    fn landed(&self) -> bool {
        self.outcome().is_some()
    }

    fn keep(&self, memory: (Pinned, OnCard)) {
        if let State::Aloft { kept, .. } = &mut *self.state.lock() {
            *kept = Some(memory);
        }
    }

    fn refused(&self, error: Error) {
        *self.state.lock() = State::Ended(Err(error));
    }
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch").field("ended", &self.outcome()).finish_non_exhaustive()
    }
}
