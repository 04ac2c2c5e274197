//! Half an agent, which threads of Python share until it is closed.

use std::sync::Arc;

use kvferry_agent::{self as agent, Error};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors;

/// Half an agent, until it is closed. A thread inside one of its methods shares it meanwhile.
pub(crate) struct Half<T>(Mutex<Option<Arc<T>>>);

pub(crate) trait Waits {
    fn end_waits(&self);
}

impl Waits for agent::Scheduler {
    fn end_waits(&self) {
        self.end_waits();
    }
}

impl Waits for agent::Worker {
    fn end_waits(&self) {
        self.end_waits();
    }
}

impl<T: Waits> Half<T> {
    pub(crate) fn new(half: T) -> Self {
        Self(Mutex::new(Some(Arc::new(half))))
    }

    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<T>> {
        self.0.lock().clone().ok_or_else(|| errors::agent(py, &Error::Stopped))
    }

    /// Gives up this share. Whoever waits at another one returns at once, and the last share ends it.
    pub(crate) fn close(&self) {
        let half = self.0.lock().take();
        if let Some(half) = half {
            half.end_waits();
        }
    }
}
