//! An engine that requests are read from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvferry_layout::Manifest;
use kvferry_plan::{LayerPlan, Plan};
use parking_lot::Mutex;

use super::departures::{Departures, Whose};
use super::load::ReadBy;
use crate::carrier::Source;
use crate::rules::audit::Trial;
use crate::wire::ticket::Incarnation;

/// An engine that requests can be read from, in one of its lives. Its connections end aside when it is dropped.
#[derive(Debug)]
pub(super) struct SourceEngine {
    pub(super) whose: Whose,
    pub(super) incarnation: Incarnation,
    pub(super) plan: Arc<Plan>,
    /// The same layer by layer, once somebody has asked for it.
    pub(super) layers: tokio::sync::OnceCell<Option<Arc<LayerPlan>>>,
    pub(super) manifests: Arc<Vec<Manifest>>,
    /// For every source of the plan; `None` where nothing is read.
    pub(super) sources: Arc<Vec<Option<Box<dyn Source>>>>,
    /// The number of each of them in its engine.
    pub(super) ranks: Vec<u32>,
    /// How those are read that are.
    pub(super) read_by: Arc<[ReadBy]>,
    /// What audits have found.
    pub(super) trial: Arc<Mutex<Trial>>,
    /// Seconds that a token took, of all layers, in the request that was read last.
    pub(super) each: Mutex<Option<f64>>,
    /// When something that was read from it arrived last.
    pub(super) arrived: Mutex<Option<Instant>>,
    pub(super) departures: Arc<Departures>,
    pub(super) left: AtomicBool,
}

impl SourceEngine {
    /// Ends its connections, aside.
    pub(super) fn leave(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.departures.leave(&self.whose, self.sources.clone());
        }
    }
}

impl Drop for SourceEngine {
    fn drop(&mut self) {
        self.leave();
    }
}
