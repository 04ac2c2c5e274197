//! Looks at many block ids at once.
//!
//! Compilers make such loops wide by themselves, but only as wide as the oldest processors can that a program is
//! built for. So each of these is built twice, and the processor is asked which one it can run.

/// Declares a function that is also built for the processors of the last ten years.
macro_rules! scan {
    (
        $(#[$meta:meta])*
        $name:ident$(<$type:ident>)?($($argument:ident: $from:ty),*) -> $to:ty { $($body:tt)* }
    ) => {
        $(#[$meta])*
        pub fn $name$(<$type>)?($($argument: $from),*) -> $to {
            #[inline(always)]
            fn plain$(<$type>)?($($argument: $from),*) -> $to { $($body)* }

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
                fn wide$(<$type>)?($($argument: $from),*) -> $to {
                    plain($($argument),*)
                }
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("popcnt")
                {
                    // SAFETY: the processor has what it is built for.
                    return unsafe { wide($($argument),*) };
                }
            }
            plain($($argument),*)
        }
    };
}

scan! {
    /// The highest of some ids; 0 where there is none.
    highest(ids: &[u32]) -> u32 {
        ids.iter().fold(0, |highest, id| highest.max(*id))
    }
}

scan! {
    /// How often an id is among others.
    count(ids: &[u32], id: u32) -> usize {
        // Few enough at a time to be counted in 32 bits.
        let count = |ids: &[u32]| ids.iter().map(|other| u32::from(*other == id)).sum::<u32>();
        ids.chunks(1 << 20).map(|ids| count(ids) as usize).sum()
    }
}

/// Sets a bit for every id, from the lowest bit of the first word on. Ids that there is no bit for are left out.
pub fn mark(ids: &[u32], bits: &mut [u64]) {
    for id in ids {
        if let Some(word) = bits.get_mut(*id as usize / 64) {
            *word |= 1 << (id % 64);
        }
    }
}

/// Sets a byte to 1 for every id. Ids that there is no byte for are left out. Unlike bits, bytes need not be read
/// before they are set.
pub fn mark_bytes(ids: &[u32], bytes: &mut [u8]) {
    for id in ids {
        if let Some(byte) = bytes.get_mut(*id as usize) {
            *byte = 1;
        }
    }
}

scan! {
    /// What bytes add up to.
    sum(bytes: &[u8]) -> usize {
        // Few enough at a time to be added up in 32 bits.
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        bytes.chunks(1 << 20).map(|bytes| sum(bytes) as usize).sum()
    }
}

scan! {
    /// How many bits are set.
    ones(bits: &[u64]) -> usize {
        bits.iter().map(|word| word.count_ones() as usize).sum()
    }
}

scan! {
    /// How many places of two tables, from the first on, are not continued by the next, where the ids of both
    /// follow; without the last.
    apart(sources: &[u32], destinations: &[u32]) -> usize {
        /// Looked at together, without a branch for each.
        const MANY: usize = 64;
        let continued = |at: usize, sources: &[u32], destinations: &[u32]| {
            (sources[at + 1] == sources[at].wrapping_add(1))
                & (destinations[at + 1] == destinations[at].wrapping_add(1))
        };
        let last = sources.len().min(destinations.len()).saturating_sub(1);
        let mut at = 0;
        while at + MANY <= last {
            let (some, others) = (&sources[at..=at + MANY], &destinations[at..=at + MANY]);
            if (0..MANY).fold(false, |any, at| any | continued(at, some, others)) {
                break;
            }
            at += MANY;
        }
        while at < last && !continued(at, sources, destinations) {
            at += 1;
        }
        at
    }
}

scan! {
    /// The lowest and the highest of the two ids that `ids` finds in an item, each by itself. Of no items: what
    /// nothing is below, and what nothing is above.
    bounds<T>(items: &[T], ids: impl Fn(&T) -> [u32; 2]) -> ([u32; 2], [u32; 2]) {
        let (mut lowest, mut highest) = ([u32::MAX; 2], [0; 2]);
        for item in items {
            for (at, id) in ids(item).into_iter().enumerate() {
                lowest[at] = lowest[at].min(id);
                highest[at] = highest[at].max(id);
            }
        }
        (lowest, highest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn ids() -> impl Strategy<Value = Vec<u32>> {
        // Some that are all over the place, and some that follow each other.
        prop_oneof![
            prop::collection::vec(any::<u32>(), 0..200),
            prop::collection::vec(0u32..100, 0..200),
            (0u32..50, 0usize..200).prop_map(|(first, many)| (first..).take(many).collect()),
        ]
    }

    proptest! {
        /// As one finds it id by id.
        #[test]
        fn every_scan_finds_what_is_there((ids, others) in (ids(), ids()), id in 0u32..100) {
            prop_assert_eq!(highest(&ids), ids.iter().copied().max().unwrap_or(0));
            prop_assert_eq!(count(&ids, id), ids.iter().filter(|other| **other == id).count());

            let mut bits = [0; 2];
            mark(&ids, &mut bits);
            let marked: BTreeSet<u32> = ids.iter().copied().filter(|id| *id < 128).collect();
            let set = |id: &u32| bits[*id as usize / 64] >> (id % 64) & 1 == 1;
            prop_assert_eq!((0..128).filter(set).collect::<BTreeSet<_>>(), marked.clone());
            prop_assert_eq!(ones(&bits), marked.len());

            let mut bytes = [0; 128];
            mark_bytes(&ids, &mut bytes);
            let set = |id: &u32| bytes[*id as usize] == 1;
            prop_assert_eq!((0..128).filter(set).collect::<BTreeSet<_>>(), marked.clone());
            prop_assert_eq!(sum(&bytes), marked.len());

            let follows = |pair: &[u32]| pair[0].wrapping_add(1) == pair[1];
            let mut both = ids.windows(2).zip(others.windows(2));
            let places = both.clone().count();
            let first = both.position(|(ours, theirs)| follows(ours) && follows(theirs));
            prop_assert_eq!(apart(&ids, &others), first.unwrap_or(places));

            let pairs: Vec<(u32, u32)> = ids.into_iter().zip(others).collect();
            let found = bounds(&pairs, |pair| [pair.0, pair.1]);
            let all = |of: fn(&(u32, u32)) -> u32| pairs.iter().map(of);
            let (ours, theirs) = (|pair: &(u32, u32)| pair.0, |pair: &(u32, u32)| pair.1);
            let least = |of| all(of).min().unwrap_or(u32::MAX);
            let most = |of| all(of).max().unwrap_or(0);
            prop_assert_eq!(found, ([least(ours), least(theirs)], [most(ours), most(theirs)]));
        }
    }
}
