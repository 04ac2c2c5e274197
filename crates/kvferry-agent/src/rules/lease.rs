//! P's side of a request: the promise to keep its blocks.
//!
//! A [`Leases`] table is a plain value: it has no clock, no thread and no socket. Whoever owns it
//! says what time it is and carries its answers, so that an exhaustive check can drive the same code
//! as a serving engine does.
//!
//! A lease ends in one of four ways ([`Ended`]), and a block is reported as released at the moment
//! its lease leaves the table, never before. An answer of [`Answer::Held`] therefore means that the
//! blocks had not been touched when the question arrived: the reader needs no clock to know that
//! what it read before it asked is good.
//!
//! A lease says what may be read: its [`Grant`]. Block ids reach the reader through a router and a
//! client; it asks with the [`Fingerprint`] of what it read by, and what is not what was granted is not
//! held. So may the ticket itself: a lease also says what its blocks were computed from ([`Origin`]), and a
//! reader that wants something else gets nothing by it.
//!
//! A lease may be opened while the engine still computes the request. It *grows* until it is *sealed*:
//! readers may follow it ([`Leases::frontier`]) and read what is complete, but nothing is confirmed
//! before the seal. Nor may what was read before it was complete be confirmed afterwards, where somebody
//! made a reader do so with a ticket that came too early and tables that were guessed: a lease that grows
//! begins with an epoch that its owner has drawn, which nobody but followers hears of before the seal.
//! While it grows the engine keeps the blocks for itself, so it neither expires nor is anything released
//! when it ends; the engine learns that nobody wants it when it speaks of it next. A lease may say what is
//! being computed beyond that ([`Leases::advance_with`]); whatever comes of it, readers go by what is
//! complete in the end. A lease may have a name beside that of its request: readers who were not given a
//! ticket find it by that.

mod words;

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::time::Duration;

use kvferry_plan::BlockTable;

use super::grant::{Claim, Fingerprint, Grant, InFlight, Origin};
pub use words::{AlreadyGranted, Answer, Consumer, Ended, LeaseKey, Loss, NotGrown, Released};

/// Bytes that can be enclosed with a lease, at most.
pub const MOST_ENCLOSED: usize = 16 << 10;

/// How far a lease has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontier<'a> {
    /// Which lease of the request.
    pub nonce: u64,
    /// What may be read.
    pub grant: &'a Grant,
    /// What is being computed beyond that.
    pub in_flight: &'a [InFlight],
    /// What its engine has enclosed.
    pub enclosed: &'a [u8],
    /// Whether that is all.
    pub sealed: bool,
}

/// All leases of one engine. Times are on the owner's own clock, since any fixed moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leases {
    term: Duration,
    longest: Duration,
    open: BTreeMap<String, Lease>,
    ended: BTreeMap<LeaseKey, Tombstone>,
    released: Vec<Released>,
    /// The request of the latest lease of each name.
    names: BTreeMap<String, String>,
    /// Requests whose lease was given up while it grew, until the engine is done with them.
    given_up: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lease {
    nonce: u64,
    name: Option<String>,
    begun: Duration,
    /// The epoch that it began with.
    first_epoch: u32,
    grant: Grant,
    in_flight: Vec<InFlight>,
    /// What followers are given beside the blocks, when it is sealed.
    enclosed: Vec<u8>,
    /// `None` while it grows.
    sealed: Option<Sealed>,
}

/// A promise to keep blocks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sealed {
    grant: Fingerprint,
    origin: Option<Origin>,
    since: Duration,
    expires: Duration,
    readers: Readers,
}

/// What is remembered of a lease that ended: a reader whose answer was lost asks again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tombstone {
    why: Ended,
    readers: Readers,
    forget: Duration,
}

/// The attempts that were confirmed while the lease was held: engine and size, rank, attempt.
type Readers = BTreeMap<(String, u32), BTreeMap<u32, u64>>;

impl Leases {
    /// A table without leases. A lease lasts `term` from when it was granted or last extended, and
    /// never more than `longest` in all.
    pub fn new(term: Duration, longest: Duration) -> Self {
        // Far from what a clock can say.
        let term = term.min(Duration::from_secs(10 * 365 * 86_400));
        let longest = longest.clamp(term, Duration::from_secs(20 * 365 * 86_400));
        Self {
            term,
            longest,
            open: BTreeMap::new(),
            ended: BTreeMap::new(),
            released: Vec::new(),
            names: BTreeMap::new(),
            given_up: BTreeSet::new(),
        }
    }

    /// How long a lease lasts without an extension.
    pub fn term(&self) -> Duration {
        self.term
    }

    /// How many leases are open.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// How many ended leases are still remembered, for their readers or for the engine.
    pub fn remembered(&self) -> usize {
        self.ended.len() + self.given_up.len()
    }

    /// Every sealed lease: its request, its age, the time left, and how many ranks have confirmed.
    pub fn iter(&self, now: Duration) -> impl Iterator<Item = (&str, Duration, Duration, usize)> {
        self.open.iter().filter_map(move |(request, lease)| {
            let sealed = lease.sealed.as_ref()?;
            let confirmed = sealed.readers.values().map(BTreeMap::len).max().unwrap_or(0);
            let age = now.saturating_sub(sealed.since);
            Some((request.as_str(), age, sealed.expires.saturating_sub(now), confirmed))
        })
    }

    /// Every lease that grows: its request, its age, how many tokens are complete, and how often the engine has
    /// started over.
    pub fn iter_growing(&self, now: Duration) -> impl Iterator<Item = (&str, Duration, u64, u32)> {
        let growing = self.open.iter().filter(|(_, lease)| lease.sealed.is_none());
        growing.map(move |(request, lease)| {
            let age = now.saturating_sub(lease.begun);
            (request.as_str(), age, lease.grant.tokens, lease.restarts())
        })
    }

    /// Promises to keep a request's blocks, which were computed from `origin`. The key's nonce must never
    /// have been used before.
    pub fn grant(
        &mut self,
        key: LeaseKey,
        grant: Grant,
        origin: Option<Origin>,
        now: Duration,
    ) -> Result<(), AlreadyGranted> {
        let request = key.request.clone();
        self.begin(key, None, 0, now)?;
        // Whatever it is, it goes on from nothing.
        let lease = self.open.get_mut(&request);
        if let Some(lease) = lease {
            lease.grant = grant;
            lease.seal(origin, now, self.term);
        }
        Ok(())
    }

    /// Begins a lease that grows. The key's nonce must never have been used before. By the name readers
    /// find it who have no ticket; of several leases of one name the latest. Nobody may be able to guess
    /// the first epoch.
    pub fn begin(
        &mut self,
        key: LeaseKey,
        name: Option<&str>,
        first_epoch: u32,
        now: Duration,
    ) -> Result<(), AlreadyGranted> {
        match self.open.entry(key.request) {
            btree_map::Entry::Occupied(entry) => Err(AlreadyGranted(entry.key().clone())),
            btree_map::Entry::Vacant(entry) => {
                self.given_up.remove(entry.key());
                if let Some(name) = name {
                    self.names.insert(name.to_owned(), entry.key().clone());
                }
                entry.insert(Lease {
                    nonce: key.nonce,
                    name: name.map(str::to_owned),
                    begun: now,
                    first_epoch,
                    grant: Grant { epoch: first_epoch, ..Grant::default() },
                    in_flight: vec![],
                    enclosed: vec![],
                    sealed: None,
                });
                Ok(())
            }
        }
    }

    /// The latest lease of a name, while it is held.
    pub fn named(&self, name: &str) -> Option<LeaseKey> {
        let request = self.names.get(name)?;
        let nonce = self.open.get(request)?.nonce;
        Some(LeaseKey { request: request.clone(), nonce })
    }

    /// More of a request is complete: so many tokens, in these blocks. The epoch is the lease's own.
    pub fn advance(
        &mut self,
        request: &str,
        tokens: u64,
        tables: Vec<BlockTable>,
    ) -> Result<(), NotGrown> {
        let lease = self.growing(request)?;
        let grown = Grant { epoch: lease.grant.epoch, tokens, tables };
        if !grown.extends(&lease.grant) {
            return Err(NotGrown::Changed {
                request: request.to_owned(),
                before: lease.grant.tokens,
                after: tokens,
            });
        }
        lease.grant = grown;
        lease.in_flight.retain(|step| step.tokens > tokens);
        Ok(())
    }

    /// The same, and what the engine computes now beyond that: all steps of the request that are in flight, in
    /// their order. What they write goes to blocks that the tables name already. All of it counts, or nothing.
    pub fn advance_with(
        &mut self,
        request: &str,
        tokens: u64,
        tables: Vec<BlockTable>,
        in_flight: &[InFlight],
    ) -> Result<(), NotGrown> {
        self.growing(request)?;
        let mut before = InFlight { step: 0, tokens };
        for step in in_flight {
            if step.step <= before.step || step.tokens <= before.tokens {
                let (request, step) = (request.to_owned(), *step);
                return Err(NotGrown::StepsDoNotRise { request, step, before });
            }
            before = *step;
        }
        self.advance(request, tokens, tables)?;
        self.growing(request)?.in_flight = in_flight.to_vec();
        Ok(())
    }

    /// What followers of a lease that grows are given with its blocks, once it is sealed: the engine's own few bytes.
    pub fn enclose(&mut self, request: &str, bytes: Vec<u8>) -> Result<(), NotGrown> {
        let lease = self.growing(request)?;
        if bytes.len() > MOST_ENCLOSED {
            let (request, bytes) = (request.to_owned(), bytes.len());
            return Err(NotGrown::TooMuchEnclosed { request, bytes });
        }
        lease.enclosed = bytes;
        Ok(())
    }

    /// The engine starts the request over: nothing that was granted so far holds any more. To be called
    /// before the blocks can change.
    pub fn restart(&mut self, request: &str) -> Result<(), NotGrown> {
        let lease = self.growing(request)?;
        lease.grant = Grant { epoch: lease.grant.epoch + 1, ..Grant::default() };
        lease.in_flight.clear();
        Ok(())
    }

    /// All of a request is complete, and was computed from `origin`: from now on the lease is a promise to
    /// keep its blocks.
    pub fn seal(
        &mut self,
        request: &str,
        tokens: u64,
        tables: Vec<BlockTable>,
        origin: Option<Origin>,
        now: Duration,
    ) -> Result<(), NotGrown> {
        if let Err(error) = self.advance(request, tokens, tables) {
            // The engine has said its last word of it.
            self.given_up.remove(request);
            return Err(error);
        }
        let term = self.term;
        self.growing(request)?.seal(origin, now, term);
        Ok(())
    }

    /// How far a request's lease has come; `None` where there is none.
    pub fn frontier(&self, request: &str) -> Option<Frontier<'_>> {
        let Lease { nonce, grant, in_flight, enclosed, sealed, .. } = self.open.get(request)?;
        Some(Frontier { nonce: *nonce, grant, in_flight, enclosed, sealed: sealed.is_some() })
    }

    /// How far a lease has come, or why it is not held.
    pub fn look(&self, key: &LeaseKey) -> Result<Frontier<'_>, Loss> {
        let frontier = self.frontier(&key.request).filter(|frontier| frontier.nonce == key.nonce);
        frontier.ok_or_else(|| self.loss(key))
    }

    /// Whether a request's lease was given up while it grew, and the engine is not done with it yet.
    pub fn given_up(&self, request: &str) -> bool {
        self.given_up.contains(request)
    }

    fn growing(&mut self, request: &str) -> Result<&mut Lease, NotGrown> {
        let given_up = self.given_up(request);
        let lease = self.open.get_mut(request).filter(|lease| lease.sealed.is_none());
        lease.ok_or_else(|| match given_up {
            true => NotGrown::GivenUp(request.to_owned()),
            false => NotGrown::NoLease(request.to_owned()),
        })
    }

    /// A reader still wants the request. Answers whether the lease is held.
    pub fn extend(&mut self, key: &LeaseKey, now: Duration) -> Answer {
        match self.open.get_mut(&key.request) {
            Some(lease) if lease.nonce == key.nonce => {
                if let Some(sealed) = &mut lease.sealed {
                    // Never past the longest life, and never back.
                    let until = (now + self.term).min(sealed.since + self.longest);
                    sealed.expires = sealed.expires.max(until);
                }
                Answer::Held
            }
            _ => Answer::NotHeld(self.loss(key)),
        }
    }

    /// A rank has read all that it needs, by the tables and for the origin that it claims, and asks whether
    /// the blocks were kept until now. When every rank of an engine has asked, the lease ends. A rank that
    /// read by other tables, or wants what was computed from something else, is told so and is not
    /// counted: whoever changed that cannot end the lease.
    pub fn confirm(
        &mut self,
        key: &LeaseKey,
        consumer: &Consumer,
        claim: Claim,
        now: Duration,
    ) -> Answer {
        let reader = (consumer.engine.clone(), consumer.ranks);
        match self.open.get_mut(&key.request) {
            Some(lease) if lease.nonce == key.nonce => {
                if consumer.rank >= consumer.ranks {
                    return Answer::NotHeld(Loss::Unknown);
                }
                // What still grows nobody can have read.
                let Some(sealed) = &mut lease.sealed else {
                    return Answer::NotHeld(Loss::NotGranted);
                };
                if claim.read_by != sealed.grant {
                    return Answer::NotHeld(Loss::NotGranted);
                }
                if claim.origin != sealed.origin {
                    let (granted, wanted) = (sealed.origin, claim.origin);
                    return Answer::NotHeld(Loss::OtherOrigin { granted, wanted });
                }
                let ranks = sealed.readers.entry(reader).or_default();
                ranks.insert(consumer.rank, consumer.attempt);
                if ranks.len() == consumer.ranks as usize {
                    self.end(&key.request, Ended::Confirmed, now);
                }
                Answer::Held
            }
            // It may have been this very attempt whose answer was lost.
            _ => {
                match self.ended.get(key).and_then(|t| t.readers.get(&reader)?.get(&consumer.rank))
                {
                    Some(attempt) if *attempt == consumer.attempt => Answer::Held,
                    _ => Answer::NotHeld(self.loss(key)),
                }
            }
        }
    }

    /// The reader does not want the request any more. Answers whether that ended a lease.
    pub fn abandon(&mut self, key: &LeaseKey, now: Duration) -> bool {
        let open = self.open.get(&key.request).is_some_and(|lease| lease.nonce == key.nonce);
        if open {
            self.end(&key.request, Ended::Abandoned, now);
        }
        open
    }

    /// The engine takes its promise back. Answers whether there was one.
    pub fn revoke(&mut self, request: &str, now: Duration) -> bool {
        self.given_up.remove(request);
        let open = self.open.contains_key(request);
        if open {
            self.end(request, Ended::Revoked, now);
        }
        open
    }

    /// The engine takes all its promises back.
    pub fn revoke_all(&mut self, now: Duration) {
        let all: Vec<String> = self.open.keys().cloned().collect();
        for request in all {
            self.end(&request, Ended::Revoked, now);
        }
        self.given_up.clear();
    }

    /// Ends what nobody extended, and forgets what ended long ago.
    pub fn expire(&mut self, now: Duration) {
        let due = self
            .open
            .iter()
            .filter(|(_, lease)| lease.sealed.as_ref().is_some_and(|sealed| sealed.expires <= now));
        let due: Vec<String> = due.map(|(request, _)| request.clone()).collect();
        for request in due {
            self.end(&request, Ended::Expired, now);
        }
        self.ended.retain(|_, tombstone| tombstone.forget > now);
    }

    /// What was released since the last call.
    pub fn take_released(&mut self) -> Vec<Released> {
        std::mem::take(&mut self.released)
    }

    fn end(&mut self, request: &str, why: Ended, now: Duration) {
        let Some((request, lease)) = self.open.remove_entry(request) else { return };
        let key = LeaseKey { request: request.clone(), nonce: lease.nonce };
        if let Some(name) = &lease.name
            && self.names.get(name) == Some(&request)
        {
            self.names.remove(name);
        }
        let mut readers = Readers::new();
        if let Some(sealed) = lease.sealed {
            readers = sealed.readers;
            let after = now.saturating_sub(sealed.since);
            self.released.push(Released { request, why, after });
        } else if why != Ended::Revoked {
            self.given_up.insert(request);
        }
        self.ended.insert(key, Tombstone { why, readers, forget: now + self.term });
    }

    fn loss(&self, key: &LeaseKey) -> Loss {
        self.ended.get(key).map_or(Loss::Unknown, |tombstone| Loss::Ended(tombstone.why))
    }
}

impl Lease {
    fn restarts(&self) -> u32 {
        self.grant.epoch - self.first_epoch
    }

    fn seal(&mut self, origin: Option<Origin>, now: Duration, term: Duration) {
        self.in_flight.clear();
        self.sealed = Some(Sealed {
            grant: self.grant.fingerprint(),
            origin,
            since: now,
            expires: now + term,
            readers: Readers::new(),
        });
    }
}

#[cfg(test)]
mod tests;
