//! The half of the agent that lives where an engine owns its blocks.
//!
//! As a source it listens on the engine's one address ([`server`]), tells peers what the engine's ranks
//! hold, and keeps the leases ([`core`]); whoever follows one is woken when it grows ([`watchers`]). As a
//! destination it keeps alive the leases of requests that wait or are being read, gives up those that are
//! not wanted any more ([`holds`]), and knows how far those are that are still computed ([`follows`]).
//! What it is doing can be asked for ([`status`]), and it can be told that it is about to go ([`drain`]).

mod core;
mod drain;
mod follows;
mod holds;
mod notes;
mod options;
mod server;
mod status;
mod watchers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Manifest;
use kvferry_plan::BlockTable;
use tracing::{info, warn};

use self::core::Core;
pub use self::drain::ask_drain;
use self::follows::Follows;
pub use self::follows::{Following, Progress};
use self::holds::Holds;
pub use self::holds::{Lost, LostWhy};
pub use self::notes::{Did, Note};
pub use self::options::SchedulerOptions;
pub use self::status::{
    GrowingStatus, GuestStatus, HoldStatus, LeaseStatus, LeftOut, Status, ask_status,
};
use crate::background::Background;
use crate::error::Error;
use crate::metrics::SchedulerMetrics;
use crate::rules::grant::{Grant, InFlight, Origin};
use crate::rules::lease::Released;
use crate::source::relay::Relay;
use crate::wire::link::Caller;
use crate::wire::listener::{Listener, listen};
use crate::wire::lookup::lookup_here;
use crate::wire::message::{Card, Left};
use crate::wire::reach::Reach;
use crate::wire::seal::{Seal, Sealed};
use crate::wire::ticket::{Incarnation, Ticket};
use crate::wire::trust::Trust;

/// The scheduler half of an agent. Dropping it ends its thread and connections.
#[derive(Debug)]
pub struct Scheduler {
    core: Arc<Core>,
    follows: Arc<Follows>,
    background: Background,
}

impl Scheduler {
    /// Starts to listen. Peers are told to come back until the ranks are [published](Self::publish).
    pub fn start(options: SchedulerOptions) -> Result<Self, Error> {
        options.check()?;
        let background = Background::start("kvferry-sched")?;
        let (socket, bound) = listen(options.bind, None, background.handle())?;
        let address = options.address(bound)?;
        match &options.trust {
            Trust::Loopback => info!(%address, "there is no key: only this machine is served"),
            Trust::Insecure if !bound.ip().is_loopback() => {
                warn!(%address, "insecure: whoever reaches this address reads and writes the engine's memory");
            }
            _ => {}
        }
        let caller = Caller {
            who: options.engine.clone(),
            trust: options.trust.clone(),
            version: options.version,
            reach: Reach::to_peers(&options.trust, &options.peers),
            keepalive: options.keepalive,
        };
        let listener =
            Arc::new(Listener::new(options.trust.clone(), options.version, options.limits));
        let metrics =
            SchedulerMetrics { listener: listener.counts.clone(), ..SchedulerMetrics::default() };
        let metrics = Arc::new(metrics);
        let relay = Relay::new(Caller { reach: Reach::Own, ..caller.clone() });
        let holds = Arc::new(Holds::new(caller, metrics.clone()));
        let core = Core::new(options, address, listener.clone(), holds.clone(), relay, metrics)?;
        let core = Arc::new(core);
        background.spawn(listener.serve(socket, core.clone()));
        background.spawn(core.clone().expire());
        let follows = Arc::new(Follows::new(holds.clone()));
        background.spawn(holds.beat());
        Ok(Self { core, follows, background })
    }

    /// Where peers find this engine: `host:port`.
    pub fn address(&self) -> &str {
        &self.core.address
    }

    /// The engine's name.
    pub fn engine(&self) -> &str {
        &self.core.options.engine
    }

    /// This life of the engine.
    pub fn incarnation(&self) -> Incarnation {
        self.core.incarnation()
    }

    /// Makes known what the engine's ranks hold: one card of each. Cards that differ from those
    /// before begin a new life: the memory they describe is another, and all leases end.
    pub fn publish(&self, mut cards: Vec<Card>) -> Result<(), Error> {
        cards.sort_by_key(|card| card.rank);
        let ranks = cards.into_iter().enumerate().map(|(rank, card)| {
            if card.rank as usize != rank {
                return Err(Error::Cards(format!(
                    "there is no card, or more than one, of rank {rank}"
                )));
            }
            let manifest = Manifest::from_bytes(&card.manifest)
                .map_err(|error| Error::Cards(format!("the manifest of rank {rank}: {error}")))?;
            if manifest.engine() != self.core.options.engine {
                return Err(Error::Cards(format!(
                    "rank {rank} belongs to engine '{}', this is '{}'",
                    manifest.engine(),
                    self.core.options.engine
                )));
            }
            Ok((card, manifest))
        });
        self.core.publish(ranks.collect::<Result<_, _>>()?)
    }

    /// Promises to keep a request's blocks as they are, and gives the ticket to read them. Peers may use
    /// what they read by exactly these tokens and tables, and nothing else. Where the request was
    /// [opened](Self::open), the ticket is the same as then, and the grant must go on from what it has
    /// [advanced](Self::advance) to. The epoch is the agent's own: whoever does not follow the request is
    /// given it with the tables, see [`granted`](Self::granted).
    pub fn grant(&self, request: &str, grant: Grant) -> Result<Ticket, Error> {
        self.core.grant(request, grant, None)
    }

    /// Like [`grant`](Self::grant), for blocks that were computed from `origin`: peers that
    /// [load](crate::Load) them for anything else do not get to use them.
    pub fn grant_from(&self, request: &str, grant: Grant, origin: Origin) -> Result<Ticket, Error> {
        self.core.grant(request, grant, Some(origin))
    }

    /// Lets peers follow a request while it is computed, and gives the ticket to do so. Those who have no
    /// ticket find it by its name; of several requests with one name the latest. It must be
    /// [granted](Self::grant) in the end, or [taken back](Self::revoke); until then its blocks are the
    /// engine's own, and nothing is reported when nobody wants it any more.
    pub fn open(&self, request: &str, name: Option<&str>) -> Result<Ticket, Error> {
        self.core.open(request, name)
    }

    /// More of an open request is complete: all of its tokens and tables so far, whose blocks stay as they
    /// are until it is granted or [starts over](Self::restart). Tables of windows and states may change
    /// meanwhile, and count only at the end.
    pub fn advance(
        &self,
        request: &str,
        tokens: u64,
        tables: Vec<BlockTable>,
    ) -> Result<(), Error> {
        self.core.advance(request, Grant { epoch: 0, tokens, tables }, &[])
    }

    /// Like [`advance`](Self::advance), and says what the engine computes now: all of the request's steps
    /// in flight, in their order. The tables name the blocks of those, too. What ranks say of them
    /// ([`Worker::wrote`](crate::Worker::wrote)) can then be read at once. The blocks stay as they are,
    /// like those of what is complete; if a step comes to nothing, the request must
    /// [start over](Self::restart).
    pub fn advance_with(
        &self,
        request: &str,
        tokens: u64,
        tables: Vec<BlockTable>,
        in_flight: &[InFlight],
    ) -> Result<(), Error> {
        self.core.advance(request, Grant { epoch: 0, tokens, tables }, in_flight)
    }

    /// What an open request's followers are given with its blocks, as soon as it is granted: a few bytes that mean
    /// something to the two engines, such as the first token. They come as [`Ending::enclosed`](crate::Ending::enclosed),
    /// confirmed with the blocks; those who load by tables that a router has carried do not get them.
    pub fn enclose(&self, request: &str, bytes: Vec<u8>) -> Result<(), Error> {
        Ok(self.core.leases().enclose(request, bytes)?)
    }

    /// An open request starts over: nothing that it has advanced to holds any more. To be called before
    /// its blocks can change.
    pub fn restart(&self, request: &str) -> Result<(), Error> {
        self.core.restart(request)
    }

    /// What is granted of a request at this moment; `None` where it has no lease.
    pub fn granted(&self, request: &str) -> Option<Grant> {
        self.core.leases().frontier(request).map(|frontier| frontier.grant.clone())
    }

    /// This engine's word for what it hands out through a router and a client, who pass it on with the rest. `None` where
    /// peers share no key with it.
    pub fn seal(&self, what: Sealed<'_>) -> Option<Seal> {
        self.core.options.trust.seal(what)
    }

    /// Whether what came through a router and a client is what the engine that it names has said. To be called before
    /// anything is done with it: nothing else keeps a client from sending this engine to an address of its choice.
    pub fn check(&self, what: Sealed<'_>, seal: Option<Seal>) -> Result<(), Error> {
        self.core.options.trust.check_seal(what, seal)
    }

    /// Takes a promise back. The blocks are reported as released. Answers whether there was one.
    pub fn revoke(&self, request: &str) -> bool {
        self.core.revoke(request)
    }

    /// The requests whose blocks are the engine's again, since the last call.
    pub fn released(&self) -> Vec<Released> {
        self.core.released.take()
    }

    /// Like [`released`](Self::released), but waits for the first of them until `until`.
    pub fn wait_released(&self, until: Instant) -> Vec<Released> {
        self.core.released.wait(until)
    }

    /// Ends every wait at once, now and from now on, and reports nothing more. For owners who share
    /// it: what waits is not kept from dropping it.
    pub fn end_waits(&self) {
        self.core.released.close();
    }

    /// Keeps a lease of another engine alive until the request is [settled](Self::settle) or
    /// [abandoned](Self::abandon), at most for `patience`.
    pub fn hold(&self, ticket: &Ticket, patience: Duration) {
        self.core.holds.hold(ticket, patience);
    }

    /// Follows a request that another engine computes for this one, and holds its lease from when there is
    /// one. It is [lost](Self::lost) when there is nothing new for `patience`: neither has the engine
    /// heard of it, nor are more tokens complete, nor, once all are, is it settled.
    pub fn follow(
        &self,
        request: &str,
        following: Following,
        patience: Duration,
    ) -> Result<(), Error> {
        self.follows.follow(request, following, patience, self.background.handle())
    }

    /// How far a request is that is followed; `None` while the engine that computes it has not been heard
    /// from, and when it is lost or not followed any more.
    pub fn frontier(&self, request: &str) -> Option<Progress> {
        self.follows.progress(request)
    }

    /// A request that is followed is not wanted any more, whether or not its ticket is known: tells the
    /// engine that computes it.
    pub fn unfollow(&self, request: &str) {
        if let Some((ticket, unasked)) = self.follows.forget(request) {
            self.give_up(ticket, unasked);
        }
    }

    /// Stops to follow a request because another request of this engine has its lease: that one needs it, so that
    /// nothing is given up.
    pub fn leave(&self, request: &str) {
        self.follows.leave(request);
    }

    /// The request waits no more: its ranks read it. Only the [status](Self::status) tells them apart.
    pub fn reading(&self, ticket: &Ticket) {
        self.core.holds.reading(ticket);
    }

    /// The request was read and confirmed by all ranks: its lease needs no more care.
    pub fn settle(&self, ticket: &Ticket) {
        self.let_go(ticket);
    }

    /// The request is not wanted any more: tells the engine that holds the blocks. Not where nobody has ever answered,
    /// nor where this side has not met anybody yet and does not [hold](Self::hold) the lease: a ticket may name any
    /// address. Such a lease expires.
    pub fn abandon(&self, ticket: &Ticket) {
        let unasked = self.let_go(ticket);
        self.give_up(ticket.clone(), unasked);
    }

    /// Whether it was held, and its engine was not asked yet.
    fn let_go(&self, ticket: &Ticket) -> bool {
        self.follows.forget_ticket(ticket);
        self.core.holds.let_go(ticket)
    }

    fn give_up(&self, ticket: Ticket, unasked: bool) {
        let holds = self.core.holds.clone();
        self.background.spawn(async move { holds.abandon(&ticket, unasked).await });
    }

    /// The addresses of `host:port` at which an engine may be looked for that runs no agent: those of the
    /// [`peers`](SchedulerOptions::peers) or, as it proves nothing, of loopback. A name is looked up; the caller waits.
    pub fn foreign(&self, address: &str) -> Result<Vec<SocketAddr>, Error> {
        let options = &self.core.options;
        let reach = Reach::to_foreign(&options.trust, &options.peers);
        Ok(reach.choose(lookup_here(address)?)?)
    }

    /// The requests whose blocks elsewhere are gone, since the last call: do not wait for them.
    pub fn lost(&self) -> Vec<Lost> {
        let lost = self.core.holds.lost();
        // Where there was no ticket, it is forgotten already.
        for one in lost.iter().filter(|one| one.ticket.is_some()) {
            one.follows.as_deref().map(|request| self.follows.forget(request));
        }
        lost
    }

    /// The engine is about to go: nothing new is promised from now on, and what was promised is kept.
    /// Answers whether that is news.
    pub fn drain(&self) -> bool {
        self.core.drain()
    }

    /// The engine stays: takes a [drain](Self::drain) back. Answers whether that is news.
    pub fn resume(&self) -> bool {
        self.core.resume()
    }

    /// Whether it drains.
    pub fn draining(&self) -> bool {
        self.core.draining()
    }

    /// What an engine that drains must still wait for.
    pub fn left(&self) -> Left {
        self.core.left()
    }

    /// Drains when the process gets this signal, whose default effect on the process ends with that.
    pub fn drain_on(&self, signal: i32) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::Io {
            what: format!("listening to signal {signal}"),
            kind: error.kind(),
        };
        let _inside = self.background.handle().enter();
        let mut signals = tokio::signal::unix::signal(signal.into()).map_err(failed)?;
        let core = self.core.clone();
        self.background.spawn(async move {
            while signals.recv().await.is_some() {
                core.drain();
            }
        });
        Ok(())
    }

    /// Notes what readers do with this engine's leases, from now on, for [`notes`](Self::notes).
    pub fn watch(&self) {
        self.core.notes.want();
    }

    /// What readers did since the last call, if that is [watched](Self::watch).
    pub fn notes(&self) -> Vec<Note> {
        self.core.notes.take()
    }

    /// What the agent is doing.
    pub fn status(&self) -> Status {
        self.core.status()
    }

    /// Counters and histograms as Prometheus text.
    pub fn metrics(&self) -> String {
        self.core.metrics_text()
    }

    /// The counters among the metrics, by name, for engines with metrics of their own.
    pub fn counts(&self) -> Vec<(String, u64)> {
        self.core.metrics.counts()
    }
}
