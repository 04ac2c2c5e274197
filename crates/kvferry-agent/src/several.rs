//! Several transports as one: each peer is read by the best that works between the two.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_transport::{Error, Loops, Operation, StagingStatistics};

use crate::carrier::{Carrier, Chosen, Source};

/// Makes one [`Carrier`] of several ways to the same memory, the best first. A rank offers all that it
/// has. Who reads it takes the first that both have and that connects: inside a node another one than
/// across, for instance. In place of a way that cannot be had here is its name and why, as in `nixl: it is not
/// installed`. `name` is the same on both sides, whichever ways each of them has.
pub fn carry_several(
    name: &'static str,
    ways: Vec<Result<Arc<dyn Carrier>, String>>,
) -> Arc<dyn Carrier> {
    Arc::new(Several { name, ways })
}

#[derive(Debug)]
struct Several {
    name: &'static str,
    ways: Vec<Result<Arc<dyn Carrier>, String>>,
}

impl Several {
    fn ways(&self) -> impl Iterator<Item = &Arc<dyn Carrier>> {
        self.ways.iter().flatten()
    }
}

impl Carrier for Several {
    fn name(&self) -> &'static str {
        self.name
    }

    fn staging(&self) -> StagingStatistics {
        let mut all = StagingStatistics::default();
        for one in self.ways().map(|way| way.staging()) {
            all.bytes += one.bytes;
            all.in_use += one.in_use;
            all.most_in_use += one.most_in_use;
            all.packed += one.packed;
            all.waits += one.waits;
            all.refused += one.refused;
        }
        all
    }

    fn turned_away(&self) -> u64 {
        self.ways().map(|way| way.turned_away()).sum()
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let mut out = vec![];
        for way in self.ways() {
            put(&mut out, way.name().as_bytes());
            put(&mut out, &way.describe()?);
        }
        Ok(out)
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error> {
        let offered = read(description).ok_or_else(|| {
            Error::BadDescription("it is not one of several transports".to_owned())
        })?;
        let mut reasons = vec![];
        for way in &self.ways {
            let way = match way {
                Ok(way) => way,
                Err(missing) => {
                    reasons.push(missing.clone());
                    continue;
                }
            };
            let name = way.name();
            let Some((_, description)) =
                offered.iter().find(|(other, _)| *other == name.as_bytes())
            else {
                reasons.push(format!("{name}: the peer does not offer it"));
                continue;
            };
            match way.connect(description, deadline) {
                Ok(source) => {
                    let chosen = Chosen { transport: name, not_by: reasons.join("; ") };
                    tracing::info!(not_by = chosen.not_by, "{source:?} is read by {name}");
                    return Ok(Box::new(Found { source, chosen }));
                }
                Err(error) => reasons.push(format!("{name}: {error}")),
            }
        }
        Err(Error::Unsupported(format!(
            "none of the ways to the peer works ({}); make one of them work, or set another transport \
             on both sides",
            reasons.join("; ")
        )))
    }

    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        let offered = read(description).unwrap_or_default();
        let all = self.ways().flat_map(|way| {
            let own = offered.iter().filter(|(name, _)| *name == way.name().as_bytes());
            own.flat_map(|(_, description)| way.endpoints(description))
        });
        all.collect()
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        let mut last = Error::Unsupported("there is no way to look at the memory".to_owned());
        for way in self.ways() {
            match way.digest(program, deadline) {
                Err(error @ Error::Unsupported(_)) => last = error,
                done => return done,
            }
        }
        Err(last)
    }
}

/// A rank, and the way to it that works.
struct Found {
    source: Box<dyn Source>,
    chosen: Chosen,
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Source for Found {
    fn is_encrypted(&self) -> bool {
        self.source.is_encrypted()
    }

    fn chosen(&self) -> Option<&Chosen> {
        Some(&self.chosen)
    }

    fn packs_below(&self) -> u64 {
        self.source.packs_below()
    }

    fn read(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        self.source.read(loops, deadline)
    }

    fn read_packed(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        self.source.read_packed(loops, deadline)
    }

    fn disconnect(&self) {
        self.source.disconnect();
    }
}

/// What a peer would offer that has a single way.
pub(crate) fn offer_one(name: &str, description: &[u8]) -> Vec<u8> {
    let mut out = vec![];
    put(&mut out, name.as_bytes());
    put(&mut out, description);
    out
}

fn put(out: &mut Vec<u8>, block: &[u8]) {
    out.extend((block.len() as u32).to_le_bytes());
    out.extend(block);
}

/// Names and descriptions.
fn read(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut block = || {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (block, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        bytes = rest;
        Some((block, rest.is_empty()))
    };
    let mut found = vec![];
    loop {
        let (name, _) = block()?;
        let (description, last) = block()?;
        found.push((name, description));
        if last {
            return Some(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_transport::local::{Local, LocalOptions};
    use kvferry_transport::tcp::{Tcp, TcpOptions};

    use super::*;
    use crate::carrier::carry;

    /// A way that reaches peers of the same place only.
    #[derive(Debug)]
    struct Reaching {
        name: &'static str,
        place: &'static [u8],
    }

    impl Carrier for Reaching {
        fn name(&self) -> &'static str {
            self.name
        }

        fn describe(&self) -> Result<Vec<u8>, Error> {
            Ok(self.place.to_vec())
        }

        fn connect(&self, description: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
            match description == self.place {
                true => Ok(Box::new(Reached(self.name))),
                false => Err(Error::Unsupported("the peer is elsewhere".to_owned())),
            }
        }
    }

    #[derive(Debug)]
    struct Reached(#[expect(dead_code, reason = "shown")] &'static str);

    impl Source for Reached {
        fn read(&self, _: &Loops, _: Instant) -> Result<Box<dyn Operation>, Error> {
            Err(Error::Cancelled)
        }

        fn disconnect(&self) {}
    }

    /// A rank in a node: `near` works inside of one, `far` everywhere.
    fn rank(ways: &[(&'static str, &'static [u8])]) -> Arc<dyn Carrier> {
        carry_several("both", ways.iter().map(|one| Ok(way(one))).collect())
    }

    fn way(&(name, place): &(&'static str, &'static [u8])) -> Arc<dyn Carrier> {
        Arc::new(Reaching { name, place })
    }

    fn reached(from: &Arc<dyn Carrier>, to: &Arc<dyn Carrier>) -> String {
        let until = Instant::now() + Duration::from_secs(1);
        match from.connect(&to.describe().unwrap(), until) {
            Ok(source) => format!("{source:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_best_way_that_works_is_taken_for_each_peer() {
        let here = rank(&[("near", b"node 1"), ("far", b"")]);
        let beside = rank(&[("near", b"node 1"), ("far", b"")]);
        let away = rank(&[("near", b"node 2"), ("far", b"")]);
        let without = rank(&[("far", b"")]);
        let only = rank(&[("near", b"node 1")]);
        assert_eq!(reached(&here, &beside), "Reached(\"near\")");
        assert_eq!(reached(&here, &away), "Reached(\"far\")");
        assert_eq!(reached(&here, &without), "Reached(\"far\")");
        assert_eq!(reached(&without, &here), "Reached(\"far\")");
        assert_eq!(reached(&here, &only), "Reached(\"near\")");
        let refused = reached(&away, &only);
        assert!(refused.contains("near: the peer is elsewhere"), "{refused}");
        assert!(refused.contains("far: the peer does not offer it"), "{refused}");
    }

    /// Also of a way that cannot be had here, but not of one that would be worse.
    #[test]
    fn a_source_says_how_it_is_read_and_why() {
        let beside = rank(&[("near", b"node 1"), ("far", b"")]).describe().unwrap();
        let until = Instant::now() + Duration::from_secs(1);
        let chosen = |ways| {
            let source = carry_several("both", ways).connect(&beside, until).unwrap();
            source.chosen().unwrap().clone()
        };
        let missing = |why: &str| Err(why.to_owned());
        let near = |place| Ok(way(&("near", place)));
        let far = || Ok(way(&("far", b"")));
        let found = chosen(vec![near(b"node 1"), missing("far: it is not installed")]);
        assert_eq!(found, Chosen { transport: "near", not_by: String::new() });
        let found = chosen(vec![missing("near: there is no driver"), far()]);
        let not_by = "near: there is no driver".to_owned();
        assert_eq!(found, Chosen { transport: "far", not_by });
        let found = chosen(vec![near(b"node 2"), far()]);
        assert_eq!(found.transport, "far");
        assert!(found.not_by.contains("near: the peer is elsewhere"), "{found:?}");
    }

    /// Through everything that is wrapped around it.
    #[test]
    fn where_a_way_leads_is_known_before_it_is_taken() {
        let tcp = || Ok(carry(Arc::new(Tcp::new(TcpOptions::default()).unwrap())));
        let local = || Ok(carry(Arc::new(Local::new(LocalOptions::default()).unwrap())));
        let there = carry_several("both", vec![local(), tcp()]).describe().unwrap();
        let leads = |ways| carry_several("both", ways).endpoints(&there);
        let both = leads(vec![local(), tcp()]);
        assert!(both.len() == 2 && both[0] != both[1], "{both:?}");
        assert!(both.iter().all(|one| one.ip().is_loopback()), "{both:?}");
        assert_eq!(leads(vec![tcp()]), both[1..]);
        assert_eq!(leads(vec![Ok(way(&("far", b"")))]), []);
        assert_eq!(tcp().unwrap().endpoints(b"no description"), []);
    }

    #[test]
    fn what_is_cut_is_refused() {
        let whole = rank(&[("near", b"node 1"), ("far", b"x")]).describe().unwrap();
        let here = rank(&[("near", b"node 1")]);
        let one = rank(&[("near", b"node 1")]).describe().unwrap().len();
        for bytes in (0..whole.len()).filter(|bytes| *bytes != one) {
            let cut = here.connect(&whole[..bytes], Instant::now());
            assert!(matches!(cut, Err(Error::BadDescription(_))), "{bytes} bytes are enough");
        }
    }
}
