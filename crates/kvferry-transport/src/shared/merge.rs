//! From runs to the copies that are posted, for back ends that know nothing but lists: checked, and as few as can be.
//! This is the one place where such lists are made.

use kvferry_layout::ByteCopy;

use super::spans::Spans;
use crate::contract::{Error, Side};

/// Checks each copy against the regions of both sides and joins copies that touch on both, upwards or
/// downwards: engines hand out the blocks that a request has freed from its last to its first.
///
/// What lies where afterwards is what it would be without joining; empty copies vanish, and no copy
/// crosses from one region into another.
/// `touch` is called with the index of each local span that is used, often more than once.
pub(crate) fn merge(
    copies: impl IntoIterator<Item = ByteCopy>,
    local: &Spans,
    peer: &Spans,
    mut touch: impl FnMut(usize),
) -> Result<Vec<ByteCopy>, Error> {
    let mut merged: Vec<ByteCopy> = Vec::new();
    let (mut local_span, mut peer_span) = (usize::MAX, usize::MAX);
    // The first of those that lie in the same regions as the last one.
    let mut first = 0;
    for copy in copies.into_iter().filter(|copy| copy.bytes > 0) {
        let find = |spans: &Spans, side, address, hint| {
            spans.find(address, copy.bytes, hint).ok_or(Error::OutsideRegion {
                side,
                address,
                bytes: copy.bytes,
            })
        };
        let local_now = find(local, Side::Local, copy.destination, local_span)?;
        let peer_now = find(peer, Side::Peer, copy.source, peer_span)?;
        if local_now != local_span {
            touch(local_now);
        }
        if (local_now, peer_now) != (local_span, peer_span) {
            first = merged.len();
        }
        (local_span, peer_span) = (local_now, peer_now);
        add(&mut merged, first, copy);
    }
    Ok(merged)
}

/// Adds a copy to a list. It may continue one that is `first` or behind it.
pub(crate) fn add(list: &mut Vec<ByteCopy>, first: usize, mut copy: ByteCopy) {
    // One that was joined downwards may now touch the one before it.
    while let Some(longer) = list[first..].last().and_then(|last| join(last, &copy)) {
        copy = longer;
        list.pop();
    }
    list.push(copy);
}

/// Both as one, if they touch.
fn join(last: &ByteCopy, copy: &ByteCopy) -> Option<ByteCopy> {
    if touch_in_order(last, copy) {
        return Some(ByteCopy { bytes: last.bytes + copy.bytes, ..*last });
    }
    touch_in_order(copy, last).then(|| ByteCopy { bytes: last.bytes + copy.bytes, ..*copy })
}

fn touch_in_order(first: &ByteCopy, next: &ByteCopy) -> bool {
    first.source + first.bytes == next.source && first.destination + first.bytes == next.destination
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_layout::Region;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn spans(regions: &[(u64, u64)]) -> Spans {
        Spans::from_peer(regions.iter().map(|&(b, n)| Region::host(b, n)).collect()).unwrap()
    }

    /// Carries copies out byte by byte: where each byte of the destination comes from.
    fn carry_out(copies: &[ByteCopy]) -> BTreeMap<u64, u64> {
        copies
            .iter()
            .flat_map(|c| (0..c.bytes).map(|i| (c.destination + i, c.source + i)))
            .collect()
    }

    fn touches(a: ByteCopy, b: ByteCopy, local: &Spans, peer: &Spans) -> bool {
        let owner = |spans: &Spans, at| spans.find(at, 1, usize::MAX);
        (touch_in_order(&a, &b) || touch_in_order(&b, &a))
            && owner(peer, a.source) == owner(peer, b.source)
            && owner(local, a.destination) == owner(local, b.destination)
    }

    #[test]
    fn what_grows_downwards_meets_what_was_before_it() {
        let all = spans(&[(0, 100)]);
        let copy = |source, bytes| ByteCopy { source, destination: source + 20, bytes };
        let merged = merge([copy(5, 4), copy(10, 1), copy(9, 1)], &all, &all, |_| ()).unwrap();
        assert_eq!(merged, [copy(5, 6)]);
    }

    proptest! {
        /// The same bytes end up in the same places; nothing that could be joined is left;
        /// a list is refused exactly when one of its bytes, or its copies, leave a region.
        #[test]
        fn merging_agrees_with_a_byte_by_byte_model(
            runs in prop::collection::vec(
                (0u64..60, 0u64..60, prop::collection::vec(0u64..5, 1..5), any::<bool>()),
                0..8,
            ),
        ) {
            let local = spans(&[(0, 20), (20, 20), (50, 40)]);
            let peer = spans(&[(0, 30), (30, 50)]);
            let mut copies = Vec::new();
            for (mut source, mut destination, lengths, downwards) in runs {
                let mut run = Vec::new();
                for bytes in lengths {
                    run.push(ByteCopy { source, destination, bytes });
                    source += bytes;
                    destination += bytes;
                }
                if downwards {
                    run.reverse();
                }
                copies.extend(run);
            }
            let inside = copies.iter().filter(|c| c.bytes > 0).all(|c| {
                local.find(c.destination, c.bytes, usize::MAX).is_some()
                    && peer.find(c.source, c.bytes, usize::MAX).is_some()
            });
            match merge(copies.clone(), &local, &peer, |_| ()) {
                Err(Error::OutsideRegion { .. }) => prop_assert!(!inside),
                Err(other) => prop_assert!(false, "{other}"),
                Ok(merged) => {
                    prop_assert!(inside);
                    prop_assert_eq!(carry_out(&merged), carry_out(&copies));
                    for pair in merged.windows(2) {
                        prop_assert!(!touches(pair[0], pair[1], &local, &peer));
                    }
                    for c in &merged {
                        prop_assert!(c.bytes > 0);
                        prop_assert!(local.find(c.destination, c.bytes, usize::MAX).is_some());
                        prop_assert!(peer.find(c.source, c.bytes, usize::MAX).is_some());
                    }
                }
            }
        }

        /// Addresses at the end of the address space are refused, not wrapped.
        #[test]
        fn nothing_wraps(source in any::<u64>(), destination in any::<u64>(), bytes in 1u64..) {
            let all = Spans::everything();
            let fits = source.checked_add(bytes).is_some() && destination.checked_add(bytes).is_some();
            let copies = [ByteCopy { source, destination, bytes }];
            prop_assert_eq!(merge(copies, &all, &all, |_| ()).is_ok(), fits);
        }
    }
}
