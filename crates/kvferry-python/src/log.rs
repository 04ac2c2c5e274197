//! What the agent has to say, for Python's `logging`.
//!
//! Lines wait in a bounded queue until a Python thread fetches them. So no thread of ours ever waits for
//! the interpreter, which may be busy, or ending; that is why the crates that call into it from whatever
//! thread logs are not used.
//!
//! Engines fork, and what a thread of the parent waits for goes on in the child without that thread. The
//! standard library's `Condvar` keeps no list of who waits and does not mind. `parking_lot` and
//! `crossbeam-channel` keep one, and the first line in a child would wake the thread that is not there:
//! that is why neither is used here.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::convert::seconds;

/// Lines that wait for Python; further ones are counted and dropped.
const LINES: usize = 1024;

/// From the most to the least important, with what Python's `logging` calls them.
const LEVELS: [(&str, LevelFilter, u32); 5] = [
    ("off", LevelFilter::OFF, 60),
    ("error", LevelFilter::ERROR, 40),
    ("warning", LevelFilter::WARN, 30),
    ("info", LevelFilter::INFO, 20),
    ("debug", LevelFilter::DEBUG, 10),
];

/// The index of the least important level that is wanted.
static WANTED: AtomicU8 = AtomicU8::new(0);
static QUEUE: Mutex<Queue> = Mutex::new(Queue { lines: VecDeque::new(), dropped: 0 });
static READY: Condvar = Condvar::new();

struct Queue {
    lines: VecDeque<(u32, String)>,
    dropped: u64,
}

/// Lines of this level and more important ones are kept for `log_lines` from now on.
#[pyfunction]
pub(crate) fn log_level(level: &str) -> PyResult<()> {
    static INSTALL: Once = Once::new();
    let names = || LEVELS.map(|(name, ..)| name).join(", ");
    let Some(wanted) = LEVELS.iter().position(|(name, ..)| *name == level) else {
        let message = format!("'{level}' is not a level to log at: the levels are {}", names());
        return Err(PyValueError::new_err(message));
    };
    WANTED.store(u8::try_from(wanted).expect("there are few levels"), Ordering::Relaxed);
    INSTALL.call_once(|| {
        // It can fail only if another subscriber is there, and this library has no other.
        _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Lines));
    });
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

/// The lines since the last call, each with its level in Python's numbers. Waits for the first of them.
#[pyfunction]
#[pyo3(signature = (timeout=0.0))]
pub(crate) fn log_lines(py: Python<'_>, timeout: f64) -> PyResult<Vec<(u32, String)>> {
    let until = Instant::now() + seconds("timeout", timeout)?;
    Ok(py.detach(|| take(until)))
}

fn take(until: Instant) -> Vec<(u32, String)> {
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    while queue.lines.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return vec![];
        }
        queue = READY.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    let mut lines: Vec<_> = queue.lines.drain(..).collect();
    if queue.dropped > 0 {
        lines.push((30, format!("{} lines were dropped here", queue.dropped)));
        queue.dropped = 0;
    }
    lines
}

fn put(level: Level, line: String) {
    let number = LEVELS.iter().find(|(_, filter, _)| *filter == level).map_or(10, |one| one.2);
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    if queue.lines.len() < LINES {
        queue.lines.push_back((number, line));
        READY.notify_one();
    } else {
        queue.dropped += 1;
    }
}

/// Puts events into the queue.
struct Lines;

impl Lines {
    fn wanted() -> LevelFilter {
        LEVELS[usize::from(WANTED.load(Ordering::Relaxed))].1
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= Self::wanted()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(Self::wanted())
    }

    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let mut text = Text::default();
        attributes.record(&mut text);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(text);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let mut line = text.message + &text.fields;
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(around) = span.extensions().get::<Text>() {
                line += &around.fields;
            }
        }
        put(*event.metadata().level(), line);
    }
}

/// A message, and ` name=value` for every other field.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
