//! A card that moves bytes within its own memory, for another transport: it gathers runs into a buffer that
//! is moved in one piece, and scatters what came in one. The same kernel, on a stream of its own.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Loops;
use parking_lot::Mutex;

use super::CudaOptions;
use super::driver::{Card, Pinned, Stream};
use super::landing::Landing;
use super::line::{Extent, Line};
use super::program::{Ends, Program};
use super::signal::Signal;
use super::staging::OnCard;
use crate::contract::Error;

/// Carries loops out on one card.
pub(crate) struct Porter {
    card: Card,
    extent: Extent,
    line: Mutex<Line>,
}

impl Porter {
    /// Opens the card and loads the kernel.
    pub(crate) fn new(options: &CudaOptions) -> Result<Self, Error> {
        let card = Card::open(options.gpu)?;
        let all = card.multiprocessors()?;
        let line = Mutex::new(Line::new(&card, options)?);
        Ok(Self { extent: Extent::new(options.sms, all), card, line })
    }

    /// Bytes of the card's memory that nobody has.
    pub(crate) fn free_memory(&self) -> Result<u64, Error> {
        self.card.free_memory()
    }

    /// Memory of the card, and its address; it is freed with what is returned.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<(u64, Box<dyn Any + Send>), Error> {
        let memory = OnCard::new(&self.card, bytes as usize)?;
        Ok((memory.address(), Box::new(memory)))
    }

    /// Starts to carry loops out. After an error nothing of them runs.
    ///
    /// # Safety
    ///
    /// Every byte within the extents of the loops must be memory that this card reaches, and stay so until
    /// the errand has ended.
    pub(crate) unsafe fn start(&self, loops: &Loops) -> Result<Errand, Error> {
        let program = Program::new(loops, self.extent.batch_bytes(loops.bytes()), |_| 0);
        let mut line = self.line.lock();
        let (signal, stream) = line.tidings()?;
        let ends = signal.ends();
        let state = Mutex::new(State::Aloft { signal, stream, kept: None });
        let launch = Arc::new(Launch { ends, state });
        let landing: Arc<dyn Landing> = launch.clone();
        // SAFETY: the caller's promise.
        unsafe { line.start(&program, self.extent, &landing) };
        drop(line);
        match launch.outcome() {
            Some(Err(error)) => Err(error),
            _ => Ok(Errand(launch)),
        }
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        // Kernels end by themselves; what they touch may go after this.
        if let Err(error) = self.line.lock().finish() {
            tracing::warn!("the GPU does not say whether packing has ended: {error}");
        }
    }
}

impl fmt::Debug for Porter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Porter").field("gpu", &self.card.ordinal()).finish_non_exhaustive()
    }
}

/// Loops that a card carries out.
#[derive(Clone, Debug)]
pub(crate) struct Errand(Arc<Launch>);

impl Errand {
    /// How it ended; `None` while it may still touch memory.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        self.0.outcome_or_lost()
    }

    /// Waits for its end, until `until` at most.
    pub(crate) fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        // Most take less than this. A sleep is never shorter than some 60 µs.
        let awake = Instant::now() + Duration::from_millis(1);
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
