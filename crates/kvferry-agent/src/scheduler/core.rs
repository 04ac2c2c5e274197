//! What a scheduler and its server share: what the engine's ranks hold, and the leases on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Manifest;
use kvferry_plan::BlockTable;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::drain::Drain;
use super::holds::Holds;
use super::notes::Notes;
use super::options::SchedulerOptions;
use super::status::{GrowingStatus, GuestStatus, LeaseStatus, LeftOut, Status, Told, milliseconds};
use super::watchers::{Of, Watchers};
use crate::error::Error;
use crate::mailbox::Mailbox;
use crate::metrics::{SchedulerMetrics, escape};
use crate::rules::grant::{Grant, InFlight, Origin};
use crate::rules::lease::{Ended, LeaseKey, Leases, NotGrown, Released};
use crate::source::relay::Relay;
use crate::wire::listener::Listener;
use crate::wire::message::{Card, Left};
use crate::wire::ticket::{Incarnation, Ticket};

#[derive(Debug)]
pub(super) struct Core {
    pub(super) options: SchedulerOptions,
    /// Where peers find the engine.
    pub(super) address: String,
    pub(super) listener: Arc<Listener>,
    pub(super) holds: Arc<Holds>,
    pub(super) relay: Relay,
    pub(super) metrics: Arc<SchedulerMetrics>,
    pub(super) released: Mailbox<Released>,
    pub(super) watchers: Watchers,
    pub(super) drain: Mutex<Drain>,
    pub(super) notes: Notes,
    pub(super) told: Mutex<Told>,
    started: Instant,
    leases: Mutex<Leases>,
    present: Mutex<Present>,
}

/// The life that the engine is in.
#[derive(Debug)]
struct Present {
    incarnation: Incarnation,
    published: Option<Arc<Published>>,
}

/// What the engine's ranks hold, in one of its lives.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) incarnation: Incarnation,
    pub(super) ranks: Vec<(Card, Manifest)>,
}

/// Nobody can make up a ticket from another one.
fn new_key(request: &str) -> Result<LeaseKey, Error> {
    Ok(LeaseKey { request: request.to_owned(), nonce: getrandom::u64()? })
}

/// Nobody can guess it, and there is room for all that follow.
fn first_epoch() -> Result<u32, Error> {
    Ok(getrandom::u32()? >> 1 | 1)
}

impl Core {
    pub(super) fn new(
        options: SchedulerOptions,
        address: String,
        listener: Arc<Listener>,
        holds: Arc<Holds>,
        relay: Relay,
        metrics: Arc<SchedulerMetrics>,
    ) -> Result<Self, Error> {
        let incarnation = Incarnation(getrandom::u64()?);
        Ok(Self {
            address,
            listener,
            holds,
            relay,
            metrics,
            released: Mailbox::default(),
            watchers: Watchers::default(),
            drain: Mutex::default(),
            notes: Notes::default(),
            told: Mutex::default(),
            started: Instant::now(),
            leases: Mutex::new(Leases::new(options.term, options.longest)),
            present: Mutex::new(Present { incarnation, published: None }),
            options,
        })
    }

    /// Time on this engine's own clock.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock()
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.present.lock().incarnation
    }

    pub(super) fn published(&self) -> Option<Arc<Published>> {
        self.present.lock().published.clone()
    }

    pub(super) fn term_ms(&self) -> u64 {
        milliseconds(self.options.term)
    }

    pub(super) fn publish(&self, ranks: Vec<(Card, Manifest)>) -> Result<(), Error> {
        let mut present = self.present.lock();
        if let Some(published) = &present.published {
            let before = published.ranks.iter().map(|(card, _)| card);
            if before.eq(ranks.iter().map(|(card, _)| card)) {
                return Ok(());
            }
            present.incarnation = Incarnation(getrandom::u64()?);
            info!(incarnation = %present.incarnation, "the engine's ranks hold other memory: a new life");
        }
        let incarnation = present.incarnation;
        present.published = Some(Arc::new(Published { incarnation, ranks }));
        // Under the lock: no lease of the new life can be among those that end.
        self.leases().revoke_all(self.now());
        drop(present);
        self.watchers.wake_all();
        self.collect();
        Ok(())
    }

    /// Promises to keep a request's blocks; seals its lease, if it has one that grows.
    pub(super) fn grant(
        &self,
        request: &str,
        grant: Grant,
        origin: Option<Origin>,
    ) -> Result<Ticket, Error> {
        self.check_tables(request, &grant.tables)?;
        let present = self.present.lock();
        let mut leases = self.leases();
        let growing = leases.frontier(request).filter(|frontier| !frontier.sealed);
        let nonce = match growing.map(|frontier| frontier.nonce) {
            Some(nonce) => {
                leases.seal(request, grant.tokens, grant.tables, origin, self.now())?;
                nonce
            }
            None if leases.given_up(request) => {
                // Nobody wants it: the engine has heard of that now.
                leases.revoke(request, self.now());
                return Err(NotGrown::GivenUp(request.to_owned()).into());
            }
            None if self.draining() => return Err(Error::Draining(request.to_owned())),
            None => {
                let key = new_key(request)?;
                let nonce = key.nonce;
                leases.grant(key, Grant { epoch: 0, ..grant }, origin, self.now())?;
                nonce
            }
        };
        drop(leases);
        self.metrics.granted.add(1);
        debug!(request, "granted");
        self.watchers.wake(&Of::Request(request.to_owned()));
        Ok(self.ticket(&present, request, nonce))
    }

    /// Begins a lease that grows.
    pub(super) fn open(&self, request: &str, name: Option<&str>) -> Result<Ticket, Error> {
        let present = self.present.lock();
        let key = new_key(request)?;
        let nonce = key.nonce;
        let mut leases = self.leases();
        if self.draining() {
            return Err(Error::Draining(request.to_owned()));
        }
        leases.begin(key, name, first_epoch()?, self.now())?;
        drop(leases);
        debug!(request, name, "opened");
        if let Some(name) = name {
            self.watchers.wake(&Of::Name(name.to_owned()));
        }
        Ok(self.ticket(&present, request, nonce))
    }

    /// More of an open request is complete.
    pub(super) fn advance(
        &self,
        request: &str,
        grant: Grant,
        in_flight: &[InFlight],
    ) -> Result<(), Error> {
        self.check_tables(request, &grant.tables)?;
        let Grant { tokens, mut tables, .. } = grant;
        if let Some(published) = self.published() {
            // What moves on or is rewritten while the request grows is granted at the end.
            for (index, table) in tables.iter_mut().enumerate() {
                let of_rank = |(_, manifest): &(Card, Manifest)| {
                    manifest.groups().get(index).is_some_and(|group| {
                        group.window.tokens.is_some() || group.tokens_per_block.is_none()
                    })
                };
                if published.ranks.iter().any(of_rank) {
                    *table = BlockTable::default();
                }
            }
        }
        self.leases().advance_with(request, tokens, tables, in_flight)?;
        self.watchers.wake(&Of::Request(request.to_owned()));
        Ok(())
    }

    /// The engine starts an open request over.
    pub(super) fn restart(&self, request: &str) -> Result<(), Error> {
        self.leases().restart(request)?;
        debug!(request, "starts over");
        self.watchers.wake(&Of::Request(request.to_owned()));
        Ok(())
    }

    pub(super) fn revoke(&self, request: &str) -> bool {
        let revoked = self.leases().revoke(request, self.now());
        self.watchers.wake(&Of::Request(request.to_owned()));
        self.collect();
        revoked
    }

    /// No table can have more blocks than there are.
    fn check_tables(&self, request: &str, tables: &[BlockTable]) -> Result<(), Error> {
        let Some(published) = self.published() else { return Ok(()) };
        for (_, manifest) in &published.ranks {
            for (group, (table, facts)) in tables.iter().zip(manifest.groups()).enumerate() {
                if table.blocks.len() <= facts.blocks as usize {
                    continue;
                }
                let named = table.blocks.iter().filter(|id| facts.null_block != Some(**id)).count();
                if named > facts.blocks as usize {
                    return Err(Error::TableTooLong {
                        request: request.to_owned(),
                        group,
                        named,
                        blocks: facts.blocks,
                    });
                }
            }
        }
        Ok(())
    }

    fn ticket(&self, present: &Present, request: &str, nonce: u64) -> Ticket {
        Ticket {
            engine: self.options.engine.clone(),
            address: self.address.clone(),
            incarnation: present.incarnation,
            request: request.to_owned(),
            nonce,
            term_ms: self.term_ms(),
        }
    }

    /// Moves what the table has released to where the engine finds it.
    pub(super) fn collect(&self) {
        // The table is let go of first: whoever waits may ask for it at once.
        let released = self.leases().take_released();
        for one in released {
            self.metrics.ended(one.why, one.after);
            match one.why {
                Ended::Expired => {
                    warn!(request = one.request, after = ?one.after, "the lease expired");
                }
                why => debug!(request = one.request, %why, after = ?one.after, "released"),
            }
            self.released.put(one);
        }
    }

    /// Ends leases that nobody extends, for as long as this is polled.
    pub(super) async fn expire(self: Arc<Self>) {
        let pause =
            (self.options.term / 10).clamp(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            sleep(pause).await;
            self.leases().expire(self.now());
            self.collect();
            self.note_drained();
        }
    }

    pub(super) fn status(&self) -> Status {
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
        let mut growing: Vec<GrowingStatus> = {
            let leases = self.leases();
            let growing = leases.iter_growing(now);
            let growing = growing.map(|(request, age, tokens, restarts)| GrowingStatus {
                request: request.to_owned(),
                age_ms: milliseconds(age),
                tokens,
                restarts,
                followers: 0,
            });
            growing.collect()
        };
        for one in &mut growing {
            one.followers = self.watchers.waiting(&Of::Request(one.request.clone()));
        }
        let peers = self.listener.guests().into_iter().map(|guest| GuestStatus {
            who: guest.who,
            from: guest.from.to_string(),
            protocol: guest.version.to_string(),
        });
        Status {
            engine: self.options.engine.clone(),
            incarnation: self.incarnation(),
            protocol: self.options.version.to_string(),
            uptime_ms: milliseconds(now),
            ranks: self.published().map_or(0, |published| published.ranks.len()),
            draining: self.draining(),
            leases,
            growing,
            holds: self.holds.status(),
            peers: peers.collect(),
            connected_to: self.holds.connected_to(),
            left_out: LeftOut::default(),
        }
    }

    /// From now on nothing new is promised. Answers whether that is news.
    pub(super) fn drain(&self) -> bool {
        // Under the lock of the leases: none begins after this.
        let leases = self.leases();
        let mut drain = self.drain.lock();
        let news = *drain == Drain::Off;
        if news {
            *drain = Drain::Draining;
        }
        drop((drain, leases));
        if news {
            let Left { leases, holds } = self.left();
            info!(leases, holds, "drains: nothing new is handed over, what was promised is kept");
            // Whoever waits for what will not come is told so.
            self.watchers.wake_all();
            self.note_drained();
        }
        news
    }

    /// New promises are made again. Answers whether that is news.
    pub(super) fn resume(&self) -> bool {
        let before = std::mem::take(&mut *self.drain.lock());
        if before != Drain::Off {
            info!("does not drain any more: requests are handed over again");
        }
        before != Drain::Off
    }

    pub(super) fn draining(&self) -> bool {
        *self.drain.lock() != Drain::Off
    }

    pub(super) fn left(&self) -> Left {
        let leases = self.leases().open();
        Left { leases: leases as u32, holds: self.holds.len() as u32 }
    }

    /// Says that nothing is left, once.
    pub(super) fn note_drained(&self) {
        // One lock at a time: the leases' is never taken after this one's.
        let left = self.left();
        let mut drain = self.drain.lock();
        if *drain == Drain::Draining && left.is_empty() {
            *drain = Drain::Drained;
            info!("drained: nothing is kept for others, nor by others for this engine");
        }
    }

    /// As Prometheus text.
    pub(super) fn metrics_text(&self) -> String {
        let labels = format!("engine=\"{}\"", escape(&self.options.engine));
        let open = self.leases().open();
        self.metrics.text(&labels, open, self.holds.len(), self.draining())
    }
}
