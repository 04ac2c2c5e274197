//! Registered memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_layout::{ByteCopy, Place, Region};
use parking_lot::RwLock;

use super::merge::merge;
use super::spans::Spans;
use crate::contract::{Error, RegionId, Side};

/// Keeps a region from being deregistered while it is held.
pub type Hold = Arc<()>;

/// The registered regions of one transport, sorted by address and free of overlaps.
#[derive(Debug, Default)]
pub struct Regions {
    entries: RwLock<Vec<Entry>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    id: RegionId,
    region: Region,
    /// Held by this process's own operations.
    operations: Hold,
    /// Held while bytes are served to a peer.
    serving: Hold,
}

impl Regions {
    pub fn insert(&self, region: Region) -> Result<RegionId, Error> {
        let Some(end) = region.end().filter(|_| region.bytes > 0) else {
            return Err(Error::Unsupported(format!(
                "a region of {} bytes at {:#x} is not a span of memory",
                region.bytes, region.base
            )));
        };
        let mut entries = self.entries.write();
        let at = entries.partition_point(|entry| entry.region.base < region.base);
        let before = at
            .checked_sub(1)
            .and_then(|i| entries.get(i))
            .is_some_and(|entry| entry.region.base + entry.region.bytes > region.base);
        let after = entries.get(at).is_some_and(|entry| entry.region.base < end);
        if before || after {
            return Err(Error::Overlap { address: region.base, bytes: region.bytes });
        }
        let id = RegionId(self.next.fetch_add(1, Ordering::Relaxed));
        entries.insert(
            at,
            Entry { id, region, operations: Hold::default(), serving: Hold::default() },
        );
        Ok(id)
    }

    /// Takes a region out of the list, so that nothing new can touch it.
    ///
    /// Operations of this process that still touch it are waited for until `deadline`; then the
    /// region stays and the answer is [`Error::RegionBusy`]. `gone` runs once the region is out of
    /// the list. What is being served from it is waited for until `deadline` too; after that
    /// `evict` is called once, which must make the servers let go.
    pub fn remove(
        &self,
        id: RegionId,
        deadline: Instant,
        gone: impl FnOnce(),
        evict: impl FnOnce(),
    ) -> Result<Region, Error> {
        let entry = loop {
            let mut entries = self.entries.write();
            let at = entries.iter().position(|entry| entry.id == id).ok_or(Error::NoSuchRegion)?;
            if Arc::strong_count(&entries[at].operations) == 1 {
                break entries.remove(at);
            }
            drop(entries);
            if Instant::now() >= deadline {
                return Err(Error::RegionBusy);
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        gone();
        let served = || Arc::strong_count(&entry.serving) > 1;
        while served() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if served() {
            evict();
            // The servers were told to stop; each lets go as soon as its system call returns.
            let until = Instant::now() + Duration::from_secs(10);
            while served() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if served() {
                // It cannot be given back, so it stays ours.
                let mut entries = self.entries.write();
                let at = entries.partition_point(|e| e.region.base < entry.region.base);
                entries.insert(at, entry);
                return Err(Error::RegionBusy);
            }
        }
        Ok(entry.region)
    }

    pub fn spans(&self) -> Spans {
        let entries = self.entries.read();
        Spans(entries.iter().map(|entry| entry.region).collect())
    }

    /// Checks and merges the copies of one operation, and holds the local regions they touch.
    pub fn admit(
        &self,
        copies: impl IntoIterator<Item = ByteCopy>,
        peer: &Spans,
    ) -> Result<Admitted, Error> {
        // The holds are taken before the check: what was checked cannot go away afterwards.
        let (local, all) = {
            let entries = self.entries.read();
            let regions = entries.iter().map(|entry| entry.region).collect();
            let holds: Vec<Hold> = entries.iter().map(|entry| entry.operations.clone()).collect();
            (Spans(regions), holds)
        };
        let mut touched = vec![false; all.len()];
        let merged = merge(copies, &local, peer, |i| touched[i] = true)?;
        let on_gpu = std::iter::zip(&local.0, &touched)
            .any(|(region, &touched)| touched && region.place != Place::Host);
        let holds = std::iter::zip(all, touched)
            .filter_map(|(hold, touched)| touched.then_some(hold))
            .collect();
        Ok(Admitted { copies: merged, holds, on_gpu })
    }

    /// Checks that each of `spans` (address, bytes) lies in one registered region, and holds those
    /// regions for an operation of this process.
    pub fn hold(&self, spans: &[(u64, u64)]) -> Result<Vec<Hold>, Error> {
        let entries = self.entries.read();
        let regions = Spans(entries.iter().map(|entry| entry.region).collect());
        let mut touched = vec![false; entries.len()];
        let mut hint = 0;
        for &(address, bytes) in spans {
            let outside = Error::OutsideRegion { side: Side::Local, address, bytes };
            hint = regions.find(address, bytes, hint).ok_or(outside)?;
            touched[hint] = true;
        }
        let held = std::iter::zip(entries.iter(), touched).filter(|(_, touched)| *touched);
        Ok(held.map(|(entry, _)| entry.operations.clone()).collect())
    }

    /// Checks that each of `spans` (address, bytes) lies in registered memory of a place, and holds the
    /// regions they touch. A span may cross from one region into the next when they touch.
    pub fn serve(&self, spans: &[(u64, u64)], place: Place) -> Result<Vec<Hold>, Error> {
        let entries = self.entries.read();
        let mut holds: Vec<Hold> = Vec::new();
        let mut last = usize::MAX;
        for &(address, bytes) in spans {
            let outside = || Error::OutsideRegion { side: Side::Peer, address, bytes };
            let end = address.checked_add(bytes).ok_or_else(outside)?;
            let mut at = entries.partition_point(|e| e.region.base + e.region.bytes <= address);
            let mut covered = address;
            while covered < end {
                let entry = entries.get(at).ok_or_else(outside)?;
                if entry.region.base > covered || entry.region.place != place {
                    return Err(outside());
                }
                if last != at {
                    holds.push(entry.serving.clone());
                    last = at;
                }
                covered = entry.region.base + entry.region.bytes;
                at += 1;
            }
        }
        Ok(holds)
    }
}

/// Copies that may be posted.
pub struct Admitted {
    /// Checked and merged.
    pub copies: Vec<ByteCopy>,
    /// The local regions they touch.
    pub holds: Vec<Hold>,
    /// Whether any of those lies on a GPU.
    pub on_gpu: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let regions = Regions::default();
        let first = regions.insert(Region::host(100, 50)).unwrap();
        for (base, bytes) in [(100, 50), (149, 1), (90, 11), (0, 1000), (120, 5)] {
            assert!(matches!(
                regions.insert(Region::host(base, bytes)),
                Err(Error::Overlap { .. })
            ));
        }
        regions.insert(Region::host(150, 10)).unwrap();
        regions.insert(Region::host(90, 10)).unwrap();
        regions.remove(first, soon(), || (), || ()).unwrap();
        regions.insert(Region::host(100, 50)).unwrap();
        assert!(regions.insert(Region::host(0, 0)).is_err());
        assert!(regions.insert(Region::host(u64::MAX, 2)).is_err());
    }

    #[test]
    fn a_region_in_use_stays() {
        let regions = Regions::default();
        let id = regions.insert(Region::host(100, 50)).unwrap();
        let other = regions.insert(Region::host(200, 50)).unwrap();
        let copy = ByteCopy { source: 7, destination: 110, bytes: 5 };
        let admitted = regions.admit([copy], &Spans::everything()).unwrap();
        assert!(regions.remove(other, Instant::now(), || (), || ()).is_ok());
        assert_eq!(regions.remove(id, Instant::now(), || (), || ()), Err(Error::RegionBusy));
        drop(admitted);
        assert!(regions.remove(id, soon(), || (), || ()).is_ok());
        assert_eq!(regions.remove(id, soon(), || (), || ()), Err(Error::NoSuchRegion));
    }

    #[test]
    fn eviction_runs_when_servers_do_not_let_go() {
        let regions = Regions::default();
        let id = regions.insert(Region::host(100, 50)).unwrap();
        let holds = regions.serve(&[(100, 50)], Place::Host).unwrap();
        regions.remove(id, Instant::now(), || (), || drop(holds)).unwrap();
        assert!(regions.serve(&[(100, 1)], Place::Host).is_err());
    }

    proptest! {
        /// `serve` and `find` against a map of bytes.
        #[test]
        fn bounds_agree_with_a_byte_map(
            cuts in prop::collection::vec((0u64..12, 1u64..12, any::<bool>()), 0..8),
            piece in (0u64..200, 0u64..40),
        ) {
            let regions = Regions::default();
            let mut owner = [usize::MAX; 400];
            let mut host = [false; 400];
            let mut at = 0;
            for (number, (gap, bytes, on_host)) in cuts.into_iter().enumerate() {
                at += gap;
                let place = if on_host { Place::Host } else { Place::Gpu(0) };
                regions.insert(Region { base: at, bytes, place }).unwrap();
                for byte in at..at + bytes {
                    owner[byte as usize] = number;
                    host[byte as usize] = on_host;
                }
                at += bytes;
            }
            let (address, bytes) = piece;
            let range = address as usize..(address + bytes) as usize;
            let served = regions.serve(&[piece], Place::Host).is_ok();
            prop_assert_eq!(served, range.clone().all(|b| host[b]));
            let served = regions.serve(&[piece], Place::Gpu(0)).is_ok();
            prop_assert_eq!(served, range.clone().all(|b| owner[b] != usize::MAX && !host[b]));
            if bytes > 0 {
                let one = owner[address as usize];
                let model = one != usize::MAX && range.clone().all(|b| owner[b] == one);
                for hint in [0, 3, 99] {
                    prop_assert_eq!(regions.spans().find(address, bytes, hint), model.then_some(one));
                }
            }
        }

        /// Nothing near the end of the address space wraps round into a region.
        #[test]
        fn nothing_wraps(address in any::<u64>(), bytes in any::<u64>()) {
            let regions = Regions::default();
            regions.insert(Region::host(1000, 1000)).unwrap();
            let inside = bytes == 0 || (address >= 1000 && bytes <= 1000 && address <= 2000 - bytes);
            let wraps = address.checked_add(bytes).is_none();
            prop_assert_eq!(regions.serve(&[(address, bytes)], Place::Host).is_ok(), inside && !wraps);
        }
    }
}
