//! Connections that have proven nothing yet: how many there may be, whose turn it is to go when there are too many,
//! and how often the log speaks of them. Every port that strangers can reach keeps these books.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Where a connection comes from, as far as one who connects cannot choose it freely: an IPv4 address, or the /64
/// network of an IPv6 address, since a host commonly has all of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin(Ipv6Addr);

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped()),
            IpAddr::V6(address) => Self(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        }
    }
}

/// So many places for connections, or fewer where that would be more than this part (a fourth, say) of the files that
/// the process may open: whoever comes to a port must not take those that the engine needs.
pub fn at_most(places: usize, part: usize) -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live value.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    // What every process may open.
    let files = if known { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) } else { 1024 };
    places.min(files / part.max(1)).max(1)
}

/// A bounded number of places for connections that have proven nothing yet.
///
/// When there are none left, the oldest connection of the origin with the most goes: an origin that takes all places
/// loses them to those who take few, and within one origin a place lasts for as long as the others take to fill the rest.
#[derive(Debug)]
pub struct Strangers {
    places: usize,
    next: u64,
    inside: BTreeMap<u64, Origin>,
    by_origin: HashMap<Origin, VecDeque<u64>>,
}

impl Strangers {
    /// No more than so many at once, and at least one.
    pub fn new(places: usize) -> Self {
        let (inside, by_origin) = (BTreeMap::new(), HashMap::new());
        Self { places: places.max(1), next: 0, inside, by_origin }
    }

    /// Gives a place to a new connection. The second number is that of the connection that has to go, if one has to.
    pub fn enter(&mut self, from: Origin) -> (u64, Option<u64>) {
        let full = self.inside.len() >= self.places;
        let gone = full.then(|| self.longest().and_then(|ids| ids.front().copied())).flatten();
        if let Some(gone) = gone {
            self.leave(gone);
        }
        let id = self.next;
        self.next += 1;
        self.inside.insert(id, from);
        self.by_origin.entry(from).or_default().push_back(id);
        (id, gone)
    }

    fn longest(&self) -> Option<&VecDeque<u64>> {
        // The older first where two have as many: what goes does not depend on how a map is ordered.
        self.by_origin.values().max_by_key(|ids| (ids.len(), std::cmp::Reverse(ids.front())))
    }

    /// A connection has proven itself, or is gone. Whether it still had a place.
    pub fn leave(&mut self, id: u64) -> bool {
        let Some(from) = self.inside.remove(&id) else { return false };
        if let Some(ids) = self.by_origin.get_mut(&from) {
            ids.retain(|one| *one != id);
            if ids.is_empty() {
                self.by_origin.remove(&from);
            }
        }
        true
    }

    /// How many have a place.
    pub fn len(&self) -> usize {
        self.inside.len()
    }

    /// Whether nobody has a place.
    pub fn is_empty(&self) -> bool {
        self.inside.is_empty()
    }
}

/// Log lines about strangers: one for each origin and minute, with the number of those that were left out. Other things
/// that others make happen as often as they like can be told apart in the same way.
#[derive(Debug)]
pub struct Mentions<K = Origin> {
    known: HashMap<K, (Instant, u64)>,
}

impl<K> Default for Mentions<K> {
    fn default() -> Self {
        Self { known: HashMap::new() }
    }
}

/// How long an origin is not mentioned again.
const QUIET: Duration = Duration::from_secs(60);
/// So many origins are told apart within that time. The rest are not mentioned: whoever has so many addresses must not
/// fill the log.
const TOLD_APART: usize = 256;

impl<K: Eq + Hash> Mentions<K> {
    /// Whether to write a line about an origin now: if so, how many were left out since the last one.
    pub fn mention(&mut self, from: K, now: Instant) -> Option<u64> {
        if let Some((since, left_out)) = self.known.get_mut(&from) {
            if now.saturating_duration_since(*since) < QUIET {
                *left_out += 1;
                return None;
            }
            *since = now;
            return Some(std::mem::take(left_out));
        }
        if self.known.len() >= TOLD_APART {
            self.known.retain(|_, (since, _)| now.saturating_duration_since(*since) < QUIET);
            if self.known.len() >= TOLD_APART {
                return None;
            }
        }
        self.known.insert(from, (now, 0));
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Origin {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn an_origin_is_an_ipv4_address_or_a_network_of_ipv6() {
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:2"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_ne!(origin("192.0.2.1"), origin("192.0.2.2"));
        assert_eq!(origin("::ffff:192.0.2.1"), origin("192.0.2.1"));
    }

    #[test]
    fn whoever_takes_all_places_loses_them_to_others() {
        let mut strangers = Strangers::new(4);
        let (loud, quiet) = (origin("192.0.2.1"), origin("192.0.2.2"));
        let flood: Vec<_> = (0..4).map(|_| strangers.enter(loud)).collect();
        assert!(flood.iter().all(|(_, gone)| gone.is_none()));
        let (kept, gone) = strangers.enter(quiet);
        assert_eq!(gone, Some(flood[0].0));
        // However many the flood sends, the one that is not part of it stays.
        for _ in 0..100 {
            assert_ne!(strangers.enter(loud).1, Some(kept));
            assert_eq!(strangers.len(), 4);
        }
        assert!(strangers.leave(kept));
        assert!(!strangers.leave(kept));
        assert!(!strangers.leave(flood[0].0), "it has gone already");
    }

    #[test]
    fn of_one_origin_the_oldest_goes() {
        let mut strangers = Strangers::new(3);
        let one = origin("192.0.2.1");
        let ids: Vec<_> = (0..3).map(|_| strangers.enter(one).0).collect();
        strangers.leave(ids[0]);
        assert_eq!(strangers.enter(one).1, None);
        assert_eq!(strangers.enter(one).1, Some(ids[1]));
    }

    #[test]
    fn an_origin_is_mentioned_once_a_minute_and_few_are_told_apart() {
        let mut mentions = Mentions::default();
        let (one, start) = (origin("192.0.2.1"), Instant::now());
        assert_eq!(mentions.mention(one, start), Some(0));
        for _ in 0..1000 {
            assert_eq!(mentions.mention(one, start + QUIET / 2), None);
        }
        assert_eq!(mentions.mention(one, start + QUIET), Some(1000));
        for n in 0..10_000_u32 {
            mentions.mention(IpAddr::from(n.to_be_bytes()).into(), start + QUIET);
        }
        assert!(mentions.known.len() <= TOLD_APART);
        assert_eq!(mentions.mention(origin("198.51.100.1"), start + QUIET), None);
        assert_eq!(mentions.mention(origin("198.51.100.1"), start + QUIET * 2), Some(0));
    }
}
