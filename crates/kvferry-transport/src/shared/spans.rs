//! Registered memory, as those know it who do not own it.

use kvferry_layout::{Place, Region};

use crate::contract::Error;

/// Sorted spans without overlaps: what a side has registered, as the other side knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans(pub Vec<Region>);

impl Spans {
    /// Spans for a side that checks for itself.
    pub fn everything() -> Self {
        Self(vec![Region::host(0, u64::MAX)])
    }

    /// Sorts and checks what a peer said of itself.
    pub fn from_peer(mut regions: Vec<Region>) -> Result<Self, Error> {
        regions.sort_unstable_by_key(|region| region.base);
        let mut last = 0;
        for region in &regions {
            match region.end() {
                Some(end) if region.base >= last && region.bytes > 0 => last = end,
                _ => {
                    return Err(Error::BadDescription(
                        "its regions overlap or are empty".to_owned(),
                    ));
                }
            }
        }
        Ok(Self(regions))
    }

    /// The place that all of some spans (address, bytes) lie in, judged by their first and last bytes.
    /// `None` where they lie in several, or outside.
    pub fn place(&self, spans: impl IntoIterator<Item = (u64, u64)>) -> Option<Place> {
        let (mut common, mut hint) = (None, 0);
        for (address, bytes) in spans {
            for at in [address, address.checked_add(bytes.checked_sub(1)?)?] {
                hint = self.find(at, 1, hint)?;
                let place = self.0[hint].place;
                if *common.get_or_insert(place) != place {
                    return None;
                }
            }
        }
        common
    }

    /// Which span holds all of the bytes; `hint` is tried first.
    pub fn find(&self, address: u64, bytes: u64, hint: usize) -> Option<usize> {
        let end = address.checked_add(bytes)?;
        let holds = |region: &Region| region.base <= address && end <= region.base + region.bytes;
        if self.0.get(hint).is_some_and(holds) {
            return Some(hint);
        }
        let at = self.0.partition_point(|region| region.base + region.bytes <= address);
        self.0.get(at).filter(|region| holds(region)).map(|_| at)
    }
}
