//! The half of the agent that lives where an engine owns its blocks.
//!
//! As a source it listens on the engine's one address, tells peers what the engine's ranks hold, and
//! keeps the leases. As a destination it keeps alive the leases of requests that wait or are being
//! read, and gives up those that are not wanted any more.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_layout::Manifest;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until};
use tracing::{debug, info, warn};

use crate::background::{Background, after};
use crate::error::{Error, PeerError};
use crate::lease::{Answer, Ended, LeaseKey, Leases, Loss, Released};
use crate::link::{Caller, Link, Links};
use crate::message::{Card, Incarnation, Question, Reply, Ticket, Version};
use crate::metrics::{SchedulerMetrics, escape};
use crate::random::random;
use crate::server::{Limits, serve};
use crate::trust::Trust;

/// How a [`Scheduler`] is set up.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// The engine's name, the same as in its manifests.
    pub engine: String,
    /// Where to listen. Port 0 means any free one.
    pub bind: SocketAddr,
    /// The host to give to peers, where it is not the address to listen on.
    pub advertise: Option<String>,
    /// How peers prove who they are.
    pub trust: Trust,
    /// How long a lease lasts without an extension.
    pub term: Duration,
    /// How long a lease can last in all.
    pub longest: Duration,
    /// What a stranger can take of this process.
    pub limits: Limits,
    /// A quiet connection to another engine is tried this often.
    pub keepalive: Duration,
    /// The protocol to speak.
    pub version: Version,
}

impl SchedulerOptions {
    /// An engine that listens on a free port of the loopback address.
    pub fn new(engine: impl Into<String>) -> Self {
        Self {
            engine: engine.into(),
            bind: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            trust: Trust::Loopback,
            term: Duration::from_secs(30),
            longest: Duration::from_secs(1800),
            limits: Limits::default(),
            keepalive: Duration::from_secs(5),
            version: Version::CURRENT,
        }
    }
}

/// The scheduler half of an agent. Dropping it ends its thread and connections.
#[derive(Debug)]
pub struct Scheduler {
    core: Arc<Core>,
    background: Background,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: SchedulerOptions,
    address: String,
    started: Instant,
    next_nonce: AtomicU64,
    next_guest: AtomicU64,
    leases: Mutex<Leases>,
    life: Mutex<Life>,
    released: Mutex<Vec<Released>>,
    something: Condvar,
    guests: Mutex<BTreeMap<u64, GuestStatus>>,
    holds: Mutex<HashMap<Ticket, Hold>>,
    holds_changed: Notify,
    lost: Mutex<Vec<Lost>>,
    links: Links,
    pub(crate) metrics: SchedulerMetrics,
}

#[derive(Debug)]
struct Life {
    incarnation: Incarnation,
    published: Option<Arc<Published>>,
}

/// What the engine's ranks hold, in one of its lives.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) incarnation: Incarnation,
    pub(crate) ranks: Vec<(Card, Manifest)>,
}

/// A lease of another engine that is kept alive. Its ticket names it: engines choose the names of their
/// requests by themselves, and two of them may choose the same.
#[derive(Clone, Debug)]
struct Hold {
    since: Instant,
    reading: bool,
    until: Instant,
    next_beat: Instant,
    last_answer: Instant,
    beating: bool,
}

/// A request of this engine whose blocks elsewhere are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The ticket that was held.
    pub ticket: Ticket,
    /// Why.
    pub why: LostWhy,
}

/// Why blocks elsewhere are gone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostWhy {
    /// The engine says that the lease is not held.
    #[error("{0}")]
    NotHeld(Loss),
    /// The engine cannot be asked.
    #[error("{0}")]
    Unreachable(PeerError),
    /// The request has waited for as long as it may.
    #[error("it has waited for too long")]
    Patience,
}

impl Scheduler {
    /// Starts to listen. Peers are told to come back until the ranks are [published](Self::publish).
    pub fn start(options: SchedulerOptions) -> Result<Self, Error> {
        options.trust.check_bind(options.bind)?;
        if options.term < Duration::from_millis(20) {
            return Err(Error::Options(format!(
                "a lease of {:?} is too short to be extended in time: take at least 20 ms",
                options.term
            )));
        }
        let failed = |error: std::io::Error| Error::Io {
            what: format!("listening on {}", options.bind),
            kind: error.kind(),
        };
        let listener = std::net::TcpListener::bind(options.bind).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let address = match &options.advertise {
            Some(host) if host.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) => {
                format!("[{host}]:{}", bound.port())
            }
            Some(host) => format!("{host}:{}", bound.port()),
            None if bound.ip().is_unspecified() => {
                return Err(Error::Options(format!(
                    "peers cannot connect to {bound}: say which host to advertise"
                )));
            }
            None => bound.to_string(),
        };
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
            keepalive: options.keepalive,
        };
        let core = Arc::new(Core {
            address,
            started: Instant::now(),
            next_nonce: AtomicU64::new(random()?),
            next_guest: AtomicU64::new(0),
            leases: Mutex::new(Leases::new(options.term, options.longest)),
            life: Mutex::new(Life { incarnation: Incarnation(random()?), published: None }),
            released: Mutex::default(),
            something: Condvar::new(),
            guests: Mutex::default(),
            holds: Mutex::default(),
            holds_changed: Notify::new(),
            lost: Mutex::default(),
            links: Links::new(caller),
            metrics: SchedulerMetrics::default(),
            options,
        });
        let background = Background::start("kvferry-sched")?;
        let listener = {
            let _inside = background.handle().enter();
            TcpListener::from_std(listener)
                .map_err(|error| Error::Io { what: "listening".to_owned(), kind: error.kind() })?
        };
        background.spawn(serve(core.clone(), listener));
        background.spawn(expire(core.clone()));
        background.spawn(beat(core.clone()));
        Ok(Self { core, background })
    }

    /// Where peers find this engine: `host:port`.
    pub fn address(&self) -> &str {
        &self.core.address
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
        let ranks: Vec<(Card, Manifest)> = ranks.collect::<Result<_, _>>()?;
        let mut life = lock(&self.core.life);
        if let Some(published) = &life.published {
            let same =
                published.ranks.iter().map(|(card, _)| card).eq(ranks.iter().map(|(c, _)| c));
            if same {
                return Ok(());
            }
            life.incarnation = Incarnation(random()?);
            info!(incarnation = %life.incarnation, "the engine's ranks hold other memory: a new life");
        }
        let incarnation = life.incarnation;
        life.published = Some(Arc::new(Published { incarnation, ranks }));
        // Under the lock: no lease of the new life can be among those that end.
        self.core.leases().revoke_all(self.core.now());
        drop(life);
        self.core.collect();
        Ok(())
    }

    /// Promises to keep a request's blocks as they are, and gives the ticket to read them.
    pub fn grant(&self, request: &str) -> Result<Ticket, Error> {
        let core = &self.core;
        let life = lock(&core.life);
        let nonce = core.next_nonce.fetch_add(1, Ordering::Relaxed);
        let key = LeaseKey { request: request.to_owned(), nonce };
        core.leases().grant(key, crate::grant::Grant::default(), core.now())?;
        core.metrics.granted.add(1);
        debug!(request, "granted");
        Ok(Ticket {
            engine: core.options.engine.clone(),
            address: core.address.clone(),
            incarnation: life.incarnation,
            request: request.to_owned(),
            nonce,
            term_ms: u64::try_from(core.options.term.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Takes a promise back. The blocks are reported as released. Answers whether there was one.
    pub fn revoke(&self, request: &str) -> bool {
        let revoked = self.core.leases().revoke(request, self.core.now());
        self.core.collect();
        revoked
    }

    /// The requests whose blocks are the engine's again, since the last call.
    pub fn released(&self) -> Vec<Released> {
        std::mem::take(&mut lock(&self.core.released))
    }

    /// Like [`released`](Self::released), but waits for the first of them until `until`.
    pub fn wait_released(&self, until: Instant) -> Vec<Released> {
        let mut released = lock(&self.core.released);
        while released.is_empty() {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            let waited = self.core.something.wait_timeout(released, left);
            released = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut released)
    }

    /// Keeps a lease of another engine alive until the request is [settled](Self::settle) or
    /// [abandoned](Self::abandon), at most for `patience`.
    pub fn hold(&self, ticket: &Ticket, patience: Duration) {
        let now = Instant::now();
        let hold = Hold {
            since: now,
            reading: false,
            until: after(patience),
            next_beat: now,
            last_answer: now,
            beating: false,
        };
        lock(&self.core.holds).insert(ticket.clone(), hold);
        self.core.holds_changed.notify_one();
    }

    /// The request waits no more: its ranks read it. Only the [status](Self::status) tells them apart.
    pub fn reading(&self, ticket: &Ticket) {
        if let Some(hold) = lock(&self.core.holds).get_mut(ticket) {
            hold.reading = true;
        }
    }

    /// The request was read and confirmed by all ranks: its lease needs no more care.
    pub fn settle(&self, ticket: &Ticket) {
        lock(&self.core.holds).remove(ticket);
    }

    /// The request is not wanted any more: tells the engine that holds the blocks.
    pub fn abandon(&self, ticket: &Ticket) {
        lock(&self.core.holds).remove(ticket);
        let (core, ticket) = (self.core.clone(), ticket.clone());
        self.background.spawn(async move {
            // Later than this the lease has expired by itself, or nobody cares.
            let deadline = after(ticket.term().min(Duration::from_secs(60))).into();
            let told = async {
                let link = core.links.get(&ticket.address, deadline).await?;
                let (incarnation, keys) = (ticket.incarnation, vec![ticket.key()]);
                link.ask(Question::Abandon { incarnation, keys }, deadline).await
            };
            if let Err(error) = told.await {
                warn!(request = ticket.request, %error, "cannot give up the lease: it will expire");
            }
        });
    }

    /// The requests whose blocks elsewhere are gone, since the last call: do not wait for them.
    pub fn lost(&self) -> Vec<Lost> {
        std::mem::take(&mut lock(&self.core.lost))
    }

    /// What the agent is doing.
    pub fn status(&self) -> Status {
        self.core.status()
    }

    /// Counters and histograms as Prometheus text.
    pub fn metrics(&self) -> String {
        let labels = format!("engine=\"{}\"", escape(&self.core.options.engine));
        let open = self.core.leases().open();
        let holds = lock(&self.core.holds).len();
        self.core.metrics.text(&labels, open, holds)
    }

    /// The counters among the metrics, by name, for engines with metrics of their own.
    pub fn counts(&self) -> Vec<(String, u64)> {
        self.core.metrics.counts()
    }
}

/// Asks a running agent for its status.
pub fn ask_status(address: &str, trust: &Trust, patience: Duration) -> Result<Status, PeerError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| PeerError::Io { what: "starting", kind: error.kind() })?;
    let caller = Caller {
        who: "kvferry status".to_owned(),
        trust: trust.clone(),
        version: Version::CURRENT,
        keepalive: patience,
    };
    runtime.block_on(async {
        let deadline = after(patience).into();
        let link = tokio::time::timeout_at(deadline, Link::open(address, &caller)).await;
        let link = link.unwrap_or(Err(PeerError::Slow("connecting")))?;
        match link.ask(Question::Status, deadline).await? {
            Reply::Status(json) => serde_json::from_str(&json)
                .map_err(|_| PeerError::Misbehaved(crate::error::Misbehaviour::Garbage)),
            Reply::Refused(reason) => Err(PeerError::Refused(reason)),
            _ => Err(PeerError::Misbehaved(crate::error::Misbehaviour::Answer)),
        }
    })
}

impl Core {
    /// Time on this engine's own clock.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn leases(&self) -> MutexGuard<'_, Leases> {
        lock(&self.leases)
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        lock(&self.life).incarnation
    }

    pub(crate) fn published(&self) -> Option<Arc<Published>> {
        lock(&self.life).published.clone()
    }

    /// Moves what the table has released to where the engine finds it.
    pub(crate) fn collect(&self) {
        let released = self.leases().take_released();
        if released.is_empty() {
            return;
        }
        for one in &released {
            self.metrics.ended(one.why, one.after);
            match one.why {
                Ended::Expired => {
                    warn!(request = one.request, after = ?one.after, "the lease expired");
                }
                why => debug!(request = one.request, %why, after = ?one.after, "released"),
            }
        }
        lock(&self.released).extend(released);
        self.something.notify_all();
    }

    pub(crate) fn status_json(&self) -> String {
        serde_json::to_string(&self.status()).unwrap_or_default()
    }

    fn status(&self) -> Status {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let now = self.now();
        // One lock at a time.
        let leases = {
            let leases = self.leases();
            let leases = leases.iter(now).map(|(request, age, left, confirmed)| LeaseStatus {
                request: request.to_owned(),
                age_ms: milliseconds(age),
                left_ms: milliseconds(left),
                confirmed,
            });
            leases.collect()
        };
        let mut holds: Vec<HoldStatus> = {
            let holds = lock(&self.holds);
            let holds = holds.iter().map(|(ticket, hold)| HoldStatus {
                request: ticket.request.clone(),
                engine: ticket.engine.clone(),
                address: ticket.address.clone(),
                age_ms: milliseconds(hold.since.elapsed()),
                reading: hold.reading,
            });
            holds.collect()
        };
        holds.sort_by(|a, b| (&a.request, &a.engine).cmp(&(&b.request, &b.engine)));
        let mut connected_to = self.links.addresses();
        connected_to.sort();
        let peers = lock(&self.guests).values().cloned().collect();
        Status {
            engine: self.options.engine.clone(),
            incarnation: self.incarnation(),
            protocol: self.options.version.to_string(),
            uptime_ms: milliseconds(now),
            ranks: self.published().map_or(0, |published| published.ranks.len()),
            leases,
            holds,
            peers,
            connected_to,
        }
    }
}

/// What an agent is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The engine.
    pub engine: String,
    /// Its present life.
    pub incarnation: Incarnation,
    /// The protocol it speaks.
    pub protocol: String,
    /// Since when.
    pub uptime_ms: u64,
    /// How many ranks it has published.
    pub ranks: usize,
    /// The requests that it keeps for others.
    pub leases: Vec<LeaseStatus>,
    /// The requests that others keep for it: waiting, or being read.
    pub holds: Vec<HoldStatus>,
    /// Who is connected to it.
    pub peers: Vec<GuestStatus>,
    /// Whom it is connected to.
    pub connected_to: Vec<String>,
}

/// A request that is kept for others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// The request.
    pub request: String,
    /// Since when.
    pub age_ms: u64,
    /// Until it expires.
    pub left_ms: u64,
    /// Ranks that have confirmed.
    pub confirmed: usize,
}

/// A request that others keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldStatus {
    /// The request.
    pub request: String,
    /// Who keeps it.
    pub engine: String,
    /// Where.
    pub address: String,
    /// Since when.
    pub age_ms: u64,
    /// Whether it is being read; it waits otherwise.
    #[serde(default)]
    pub reading: bool,
}

/// A connected peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Who it says it is.
    pub who: String,
    /// From where.
    pub from: String,
    /// The protocol that is spoken with it.
    pub protocol: String,
}

/// The presence of a connected peer.
pub(crate) struct Guest {
    core: Arc<Core>,
    id: u64,
}

impl Guest {
    /// `None` when there are too many.
    pub(crate) fn enter(
        core: &Arc<Core>,
        who: &str,
        from: SocketAddr,
        version: Version,
    ) -> Option<Self> {
        let mut guests = lock(&core.guests);
        if guests.len() >= core.options.limits.connections {
            return None;
        }
        let id = core.next_guest.fetch_add(1, Ordering::Relaxed);
        let (who, from, protocol) = (who.to_owned(), from.to_string(), version.to_string());
        guests.insert(id, GuestStatus { who, from, protocol });
        Some(Self { core: core.clone(), id })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        lock(&self.core.guests).remove(&self.id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends leases that nobody extends.
async fn expire(core: Arc<Core>) {
    let pause =
        (core.options.term / 10).clamp(Duration::from_millis(5), Duration::from_millis(500));
    loop {
        sleep(pause).await;
        core.leases().expire(core.now());
        core.collect();
    }
}

/// Keeps the leases of others alive: one message to each engine for all of them.
async fn beat(core: Arc<Core>) {
    loop {
        let next = {
            let holds = lock(&core.holds);
            let next = holds.values().map(|hold| match hold.beating {
                true => hold.until,
                false => hold.until.min(hold.next_beat),
            });
            next.min()
        };
        match next {
            Some(next) => tokio::select! {
                () = sleep_until(next.into()) => {}
                () = core.holds_changed.notified() => continue,
            },
            None => {
                core.holds_changed.notified().await;
                continue;
            }
        }
        let now = Instant::now();
        let mut due: HashMap<String, Vec<Ticket>> = HashMap::new();
        let mut shortest = Duration::MAX;
        let mut tired = vec![];
        {
            let mut holds = lock(&core.holds);
            holds.retain(|ticket, hold| {
                let patient = now < hold.until;
                if !patient {
                    tired.push(ticket.clone());
                }
                patient
            });
            for (ticket, hold) in &mut *holds {
                if hold.beating || hold.next_beat > now {
                    continue;
                }
                hold.beating = true;
                shortest = shortest.min(ticket.term());
                due.entry(ticket.address.clone()).or_default().push(ticket.clone());
            }
        }
        for ticket in tired {
            core.lose(ticket, LostWhy::Patience);
        }
        for (address, tickets) in due {
            let core = core.clone();
            tokio::spawn(async move {
                let deadline = tokio::time::Instant::now() + shortest / 3;
                extend(&core, &address, tickets, deadline).await;
                core.holds_changed.notify_one();
            });
        }
    }
}

async fn extend(core: &Core, address: &str, tickets: Vec<Ticket>, deadline: tokio::time::Instant) {
    let mut lives: BTreeMap<Incarnation, Vec<Ticket>> = BTreeMap::new();
    for ticket in tickets {
        lives.entry(ticket.incarnation).or_default().push(ticket);
    }
    for (incarnation, tickets) in lives {
        let keys: Vec<LeaseKey> = tickets.iter().map(Ticket::key).collect();
        let answer = async {
            let link = core.links.get(address, deadline).await?;
            link.ask(Question::Extend { incarnation, keys }, deadline).await
        };
        let answer = match answer.await {
            Ok(Reply::Leases(answers)) if answers.len() == tickets.len() => Ok(answers),
            Ok(_) => Err(PeerError::Misbehaved(crate::error::Misbehaviour::Answer)),
            Err(error) => Err(error),
        };
        let now = Instant::now();
        for (i, ticket) in tickets.iter().enumerate() {
            let mut holds = lock(&core.holds);
            let Some(hold) = holds.get_mut(ticket) else { continue };
            hold.beating = false;
            let why = match &answer {
                Ok(answers) => match answers[i] {
                    Answer::Held => {
                        core.metrics.heartbeats.add(1);
                        hold.last_answer = now;
                        hold.next_beat = now + ticket.term() / 3;
                        continue;
                    }
                    // Every rank has read it: the engine has only not heard of it yet.
                    Answer::NotHeld(Loss::Ended(Ended::Confirmed)) => {
                        holds.remove(ticket);
                        continue;
                    }
                    Answer::NotHeld(loss) => LostWhy::NotHeld(loss),
                },
                Err(error) => {
                    hold.next_beat = now + ticket.term() / 6;
                    // Once a whole term has passed without an answer the lease may be gone. Whoever
                    // waits for it need not wait any longer.
                    if now.duration_since(hold.last_answer) < ticket.term() {
                        continue;
                    }
                    LostWhy::Unreachable(error.clone())
                }
            };
            holds.remove(ticket);
            drop(holds);
            core.lose(ticket.clone(), why);
        }
    }
}

impl Core {
    fn lose(&self, ticket: Ticket, why: LostWhy) {
        warn!(request = ticket.request, engine = ticket.engine, %why, "a lease of another engine is lost");
        self.metrics.lost.add(1);
        lock(&self.lost).push(Lost { ticket, why });
    }
}
