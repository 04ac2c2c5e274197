//! Lists of copies, for a kernel that knows loops.

use std::collections::BTreeMap;

use kvferry_layout::{BlockPair, ByteCopy, Loops};

use kvferry_transport::shared::spans::Spans;
use kvferry_transport::{Error, Side};

/// A list of copies as loops: those of one length between the same two regions share a nest, whose
/// "blocks" are places in the regions. Copies must lie in regions of both sides.
pub(super) fn grouped(copies: &[ByteCopy], local: &Spans, peer: &Spans) -> Result<Loops, Error> {
    let mut groups: BTreeMap<(usize, usize, u64, u32), Vec<&ByteCopy>> = BTreeMap::new();
    let (mut ours, mut theirs) = (0, 0);
    for copy in copies {
        let find = |spans: &Spans, side, address, hint| {
            let outside = Error::OutsideRegion { side, address, bytes: copy.bytes };
            spans.find(address, copy.bytes, hint).ok_or(outside)
        };
        ours = find(local, Side::Local, copy.destination, ours)?;
        theirs = find(peer, Side::Peer, copy.source, theirs)?;
        // In units that are as large as alignment allows, counted from the regions' starts.
        let offsets = (copy.source - peer.0[theirs].base) | (copy.destination - local.0[ours].base);
        let unit = offsets.trailing_zeros().min(12);
        groups.entry((ours, theirs, copy.bytes, unit)).or_default().push(copy);
    }
    let mut loops = Loops::default();
    for ((ours, theirs, bytes, unit), group) in groups {
        // Where a place has too large a number, the copies go one by one.
        let (from, to) = (peer.0[theirs].base, local.0[ours].base);
        let number = |address: u64, base: u64| u32::try_from((address - base) >> unit).ok();
        let pairs: Option<Vec<BlockPair>> = group
            .iter()
            .map(|copy| {
                Some(BlockPair {
                    source: number(copy.source, from)?,
                    destination: number(copy.destination, to)?,
                })
            })
            .collect();
        let failed = |error: kvferry_layout::LoopsError| Error::Unsupported(error.to_string());
        if let Some(pairs) = pairs {
            let table = loops.add_table(pairs);
            loops
                .add_nest((from, to), bytes, (1 << unit, 1 << unit), &[], table)
                .map_err(failed)?;
            continue;
        }
        let table = loops.add_table([BlockPair::default()]);
        for copy in group {
            let start = (copy.source, copy.destination);
            loops.add_nest(start, bytes, (0, 0), &[], table).map_err(failed)?;
        }
    }
    Ok(loops)
}
