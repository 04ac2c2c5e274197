//! How many connections there may be at a port, and who has to go when there are too many.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvferry_transport::strangers::{Origin, Strangers};
use tokio::sync::oneshot;
use tracing::info;

use super::version::Version;

/// What a stranger can take of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of peers that have proven themselves, and at most a quarter of the files that the process may open.
    /// When there are more, one is let go of those that come from where most come from: the one that was quiet for
    /// longest. Its peer connects again when it needs to.
    pub connections: usize,
    /// Connections that are still proving themselves, and at most an eighth of the files that the process may open.
    /// When there are more, the oldest of those is dropped that come from where most come from: an IPv4 address, or a
    /// /64 network. So many times as long as a new one takes to come, a peer has to prove itself.
    pub strangers: usize,
    /// How long a connection may take to prove itself, all in all.
    pub opening: Duration,
    /// How long a connection may be silent. Peers say something every few seconds.
    pub idle: Duration,
    /// How long a peer may take to read an answer. It waits no longer itself.
    pub answer: Duration,
    /// How long a peer waits for something new before it is told that there is none.
    pub poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            // At 5,000 a second one has 400 ms: four round trips of 100 ms.
            strangers: 2048,
            opening: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            answer: Duration::from_secs(15),
            poll: Duration::from_secs(1),
        }
    }
}

impl Limits {
    /// As much of it as this process can give.
    pub(super) fn within_process(self) -> Self {
        let files = most_files();
        let limits = self.within(files);
        if limits != self {
            let Self { connections, strangers, .. } = limits;
            info!(
                files,
                connections,
                strangers,
                "there are fewer places for peers than there should be: the process may open only so many files"
            );
        }
        limits
    }

    /// As much of it as a process can give that may open so many files: it needs most of them for other things.
    fn within(self, files: Option<usize>) -> Self {
        let Some(files) = files else { return self };
        let connections = self.connections.min(files / 4).max(1);
        Self { connections, strangers: self.strangers.min(files / 8).max(1), ..self }
    }
}

/// How many files this process may open, where that is bounded.
fn most_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    limit.split_whitespace().next()?.parse().ok()
}

/// What a connection has as long as no other gets it.
type Place = oneshot::Sender<Infallible>;
/// Ends when the place is lost.
pub(super) type Lost = oneshot::Receiver<Infallible>;

/// Connections that are still proving themselves.
#[derive(Debug)]
pub(super) struct Waiting {
    strangers: Strangers,
    places: HashMap<u64, Place>,
}

impl Waiting {
    pub(super) fn new(places: usize) -> Self {
        Self { strangers: Strangers::new(places), places: HashMap::new() }
    }

    /// A new one has a place, until it is lost to another or given back.
    pub(super) fn enter(&mut self, from: Origin) -> (u64, Lost) {
        let (place, lost) = oneshot::channel();
        let (number, gone) = self.strangers.enter(from);
        self.places.insert(number, place);
        if let Some(gone) = gone {
            self.places.remove(&gone);
        }
        (number, lost)
    }

    /// It has proven itself, or never will.
    pub(super) fn leave(&mut self, number: u64) {
        self.strangers.leave(number);
        self.places.remove(&number);
    }
}

/// A peer that has proven itself.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    /// Who it says it is.
    pub(crate) who: String,
    pub(crate) from: SocketAddr,
    /// What is spoken with it.
    pub(crate) version: Version,
}

/// Connections of peers that have proven themselves.
#[derive(Debug)]
pub(super) struct Guests {
    places: usize,
    next: u64,
    inside: BTreeMap<u64, Inside>,
}

#[derive(Debug)]
struct Inside {
    guest: Guest,
    /// Since when it has neither asked anything nor taken an answer.
    quiet: Instant,
    _place: Place,
}

impl Inside {
    fn origin(&self) -> Origin {
        self.guest.from.ip().into()
    }
}

impl Guests {
    pub(super) fn new(places: usize) -> Self {
        Self { places: places.max(1), next: 0, inside: BTreeMap::new() }
    }

    /// All of them, in the order in which they came.
    pub(super) fn all(&self) -> impl Iterator<Item = &Guest> {
        self.inside.values().map(|one| &one.guest)
    }

    /// A new one has a place until it is lost to another or given back. Where all were taken, the last is who has lost
    /// its own.
    pub(super) fn enter(&mut self, guest: Guest) -> (u64, Lost, Option<Guest>) {
        let gone = match self.inside.len() < self.places {
            true => None,
            false => self.quietest(guest.from.ip().into()),
        };
        let gone = gone.and_then(|id| self.inside.remove(&id)).map(|one| one.guest);
        let (place, lost) = oneshot::channel();
        let id = self.next;
        self.next += 1;
        self.inside.insert(id, Inside { guest, quiet: Instant::now(), _place: place });
        (id, lost, gone)
    }

    /// It has said or taken something.
    pub(super) fn stirs(&mut self, id: u64) {
        if let Some(one) = self.inside.get_mut(&id) {
            one.quiet = Instant::now();
        }
    }

    pub(super) fn leave(&mut self, id: u64) {
        self.inside.remove(&id);
    }

    /// Who has to go for a new one: of those from where most come, the new one counted, the one that was quiet for
    /// longest. Whoever takes all places and does nothing with them, or does not read what it has asked for, loses
    /// them to those who do.
    fn quietest(&self, new: Origin) -> Option<u64> {
        let mut many: HashMap<Origin, usize> = HashMap::from([(new, 1)]);
        for one in self.inside.values() {
            *many.entry(one.origin()).or_default() += 1;
        }
        let most = many.values().max();
        let all = self.inside.iter().filter(|(_, one)| many.get(&one.origin()) == most);
        all.min_by_key(|(_, one)| one.quiet).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_only_so_many_places_as_the_process_may_open_files() {
        let wanted = Limits { connections: 1000, strangers: 2000, ..Limits::default() };
        assert_eq!(wanted.within(None), wanted);
        assert_eq!(wanted.within(Some(100_000)), wanted);
        let few = wanted.within(Some(1024));
        assert_eq!((few.connections, few.strangers), (256, 128));
        let none = wanted.within(Some(3));
        assert_eq!((none.connections, none.strangers), (1, 1));
        // The system says how many: where it stops to, this must be noticed.
        assert!(most_files().is_some_and(|files| files > 3));
    }

    #[test]
    fn whoever_takes_most_places_loses_the_quietest_of_them() {
        let mut guests = Guests::new(4);
        let mut enter = |ip: [u8; 4]| {
            let (who, version) = (String::new(), Version::CURRENT);
            let (id, lost, gone) = guests.enter(Guest { who, from: (ip, 1).into(), version });
            // The second of the three that come first has just said something, and so has the first.
            guests.stirs(2);
            guests.stirs(1);
            assert!(guests.inside.len() <= 4);
            ((id, lost), gone.map(|gone| gone.from.ip().to_string()))
        };
        let there =
            |one: &mut (u64, Lost)| one.1.try_recv() == Err(oneshot::error::TryRecvError::Empty);
        let (loud, quiet, third) = ([192, 0, 2, 1], [192, 0, 2, 2], [192, 0, 2, 3]);
        let (mut one, _) = enter(quiet);
        let mut crowd: Vec<_> = (0..3).map(|_| enter(loud).0).collect();
        let (mut other, gone) = enter(third);
        assert_eq!(gone.as_deref(), Some("192.0.2.1"));
        assert!(there(&mut crowd[0]) && there(&mut crowd[1]) && !there(&mut crowd[2]));
        for _ in 0..10 {
            assert_eq!(enter(loud).1.as_deref(), Some("192.0.2.1"));
        }
        assert!(there(&mut one) && there(&mut other));
    }
}
