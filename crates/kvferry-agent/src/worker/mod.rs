//! The half of the agent that lives with one rank's memory.
//!
//! As a source it makes a [`Card`], and does [tasks](crate::source) for its scheduler; the transport serves
//! the memory by itself. As a destination
//! it shakes hands with the engines that requests come from, once each ([`peers`]), compiles the plan,
//! reads ([`mover`]), compares what it has with what the source holds ([`audit`]), and asks for
//! confirmation. Each request ([`load`]) lives by the rules of [`life`](crate::rules::life) ([`drive`]).
//! Where the source still computes it, it is read as it grows ([`growth`]), by layers where the source
//! says which it has written ([`words`]). Engines that run no agent are [`introduced`].

mod audit;
mod core;
mod departures;
mod drive;
mod growth;
mod introduced;
mod load;
mod mover;
mod opening;
pub(crate) mod options;
mod peer_entry;
mod peers;
mod places;
mod rank;
mod report;
mod source_engine;
#[cfg(test)]
mod tests;
mod words;

use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::Manifest;
use tracing::{Instrument, error_span, warn};

use self::core::Core;
use self::drive::drive;
pub use self::introduced::IntroducedRank;
pub use self::load::{Ending, Load, Lowerings, Moments, Notice, Outcome, ReadBy};
pub use self::options::WorkerOptions;
use self::peers::Peers;
use self::rank::Rank;
use crate::background::Background;
use crate::carrier::Carrier;
use crate::error::Error;
use crate::metrics::WorkerMetrics;
use crate::source::service::Service;
use crate::source::steps::Steps;
use crate::wire::link::Caller;
use crate::wire::message::Card;
use crate::wire::reach::Reach;
use crate::wire::ticket::Incarnation;

/// The worker half of an agent. Dropping it cancels what is under way and ends its threads.
#[derive(Debug)]
pub struct Worker {
    core: Arc<Core>,
    options: WorkerOptions,
    steps: Arc<Steps>,
    background: Background,
}

impl Worker {
    /// Starts the worker of the rank that `manifest` describes. The manifest's regions must be
    /// registered with the transport.
    pub fn start(
        options: WorkerOptions,
        manifest: Manifest,
        carrier: Arc<dyn Carrier>,
    ) -> Result<Self, Error> {
        if manifest.rank() >= options.ranks {
            return Err(Error::Options(format!(
                "there is no rank {} in an engine of {} ranks: they are numbered from 0",
                manifest.rank(),
                options.ranks
            )));
        }
        let caller = Caller {
            who: format!("{}/{} ({})", manifest.engine(), manifest.rank(), manifest.label()),
            trust: options.trust.clone(),
            version: options.version,
            reach: Reach::to_peers(&options.trust, &options.peers),
            keepalive: options.keepalive,
        };
        let metrics = Arc::new(WorkerMetrics::default());
        let background = Background::start("kvferry-worker")?;
        let steps = Arc::new(Steps::default());
        let mut rank = Rank::new(manifest, options.ranks, carrier, caller.reach.clone());
        let service = Service::start(
            &options,
            rank.manifest.clone(),
            rank.carrier.clone(),
            steps.clone(),
            &background,
        );
        match service {
            Ok(card) => rank.service = Some(card),
            // It can be read all the same.
            Err(error) => {
                warn!(%error, "this rank takes no tasks: readers cannot audit what they read");
            }
        }
        let aside = background.handle().clone();
        let peers = Peers::new(rank, caller, metrics.clone(), aside);
        let core = Arc::new(Core::new(
            peers,
            options.concurrent,
            options.audit,
            options.lowering,
            metrics,
        )?);
        let watched = core.clone();
        background.spawn(async move { watched.peers.look_after().await });
        Ok(Self { core, options, steps, background })
    }

    /// What this rank makes known to other engines, through its scheduler.
    pub fn card(&self) -> Result<Card, Error> {
        self.core.peers.rank.card()
    }

    /// The engine begins a step: the number is the one by which its scheduler has said what it is about
    /// ([`Scheduler::advance_with`](crate::Scheduler::advance_with)). Steps before it are over: all that they
    /// write is written.
    pub fn begin_step(&self, step: u64) {
        self.steps.begin(step);
    }

    /// Whether anybody wants to hear what a step writes. Where nobody does, it can be told later, with what is
    /// written until then.
    pub fn is_heard(&self, step: u64) -> bool {
        self.steps.is_heard(step)
    }

    /// The present step has written all that it writes of these states: readers may read that now.
    pub fn wrote(&self, step: u64, states: impl IntoIterator<Item = String>) {
        self.steps.wrote(step, states);
    }

    /// The present step has written everything.
    pub fn end_step(&self, step: u64) {
        self.steps.end(step);
    }

    /// Starts to load a request. How it ends is told by [`notices`](Self::notices).
    pub fn load(&self, load: Load) -> Result<(), Error> {
        let running = self.core.begin(&load.request)?;
        self.core.metrics.loads.add(1);
        // Of the highest level: what it says belongs to every line within, whatever is logged.
        let (engine, theirs) = (&load.ticket.engine, &load.ticket.request);
        let span = error_span!("load", request = load.request, from = engine, theirs);
        let driven = drive(self.core.clone(), Arc::new(load), running, self.options.times());
        self.background.spawn(driven.instrument(span));
        Ok(())
    }

    /// Makes an engine known that runs no agent. Loads with tickets of this address and life are read
    /// from it; **they are used without a confirmation**.
    pub fn introduce(
        &self,
        address: &str,
        incarnation: Incarnation,
        ranks: Vec<IntroducedRank>,
    ) -> Result<(), Error> {
        self.core.peers.introduce(address, incarnation, ranks)
    }

    /// The request is not wanted any more. Its end is reported as any other.
    pub fn abort(&self, request: &str) {
        self.core.abort(request);
    }

    /// What has happened since the last call.
    pub fn notices(&self) -> Vec<Notice> {
        self.core.notices.take()
    }

    /// Like [`notices`](Self::notices), but waits for the first of them until `until`.
    pub fn wait(&self, until: Instant) -> Vec<Notice> {
        self.core.notices.wait(until)
    }

    /// Ends every wait at once, now and from now on, and reports nothing more. For owners who share
    /// it: what waits is not kept from dropping it.
    pub fn end_waits(&self) {
        self.core.notices.close();
    }

    /// The loads under way, and what each is doing.
    pub fn loads(&self) -> Vec<(String, &'static str)> {
        self.core.loads()
    }

    /// Counters and histograms as Prometheus text.
    pub fn metrics(&self) -> String {
        self.core.metrics_text()
    }

    /// Some of the counters, by name, for engines with metrics of their own: what the ends of loads do not
    /// tell.
    pub fn counts(&self) -> Vec<(String, u64)> {
        self.core.counts()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // First no task can start to read, then what is read is cancelled.
        self.background.stop();
        self.core.stop_reading();
    }
}
