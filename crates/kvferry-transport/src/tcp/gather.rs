//! What a request to gather says: the source's half of loops, a few hundred bytes however many runs it
//! is.
//!
//! Tables of blocks (each a count and block numbers), then nests (start, run, block stride, table, and
//! loops of count and stride). It decodes to loops whose destination is nowhere: who gathers says where.

use kvferry_layout::{BlockPair, CutLimits, Loop, Loops, LoopsError, MAX_LOOPS};

use crate::contract::InvalidFrame;
use crate::shared::bytes::Fields;

/// How much one request may gather. Large enough to hide what a request costs, small enough to stay in
/// a cache between being gathered and sent.
pub const LIMITS: CutLimits = CutLimits { bytes: 256 << 10, nests: 256, pairs: 1 << 14 };

/// Bytes of a buffer for that: nests start at multiples of 16.
pub const SLOT_BYTES: u64 = LIMITS.bytes + 16 * LIMITS.nests as u64;

/// The most bytes of a request.
pub const MAX_BYTES: usize = 8 + LIMITS.nests * (4 + 32 + MAX_LOOPS * 16) + LIMITS.pairs * 4;

/// Writes the source's half of loops.
pub fn encode(loops: &Loops, out: &mut Vec<u8>) {
    out.extend((loops.tables() as u32).to_le_bytes());
    out.extend((loops.nests().len() as u32).to_le_bytes());
    for table in 0..loops.tables() {
        let pairs = &loops.pairs()[loops.table(table)];
        out.extend((pairs.len() as u32).to_le_bytes());
        for pair in pairs {
            out.extend(pair.source.to_le_bytes());
        }
    }
    for nest in loops.nests() {
        for number in [nest.source, nest.run, nest.blocks.0] {
            out.extend(number.to_le_bytes());
        }
        for number in [nest.table, nest.loops.len()] {
            out.extend((number as u32).to_le_bytes());
        }
        for repeat in nest.loops {
            out.extend(repeat.count.to_le_bytes());
            out.extend(repeat.source.to_le_bytes());
        }
    }
}

/// The most bytes that any request may gather: what a card moves at once.
pub const MOST_PACKED: u64 = 64 << 20;

/// Reads it. `most` bytes may be gathered.
pub fn decode(bytes: &[u8], most: u64) -> Result<Loops, InvalidFrame> {
    let mut fields = Fields(bytes);
    let mut small = |most: usize| {
        let number = fields.u32().ok_or(InvalidFrame::Cut)? as usize;
        if number > most { Err(InvalidFrame::Length(number as u64)) } else { Ok(number) }
    };
    let (tables, nests) = (small(LIMITS.nests)?, small(LIMITS.nests)?);
    let mut loops = Loops::default();
    let mut pairs = 0;
    for _ in 0..tables {
        let count = fields.u32().ok_or(InvalidFrame::Cut)? as usize;
        pairs += count;
        if pairs > LIMITS.pairs {
            return Err(InvalidFrame::Length(pairs as u64));
        }
        let blocks = fields.take(count * 4).ok_or(InvalidFrame::Cut)?.as_chunks::<4>().0;
        let pair =
            |block: &[u8; 4]| BlockPair { source: u32::from_le_bytes(*block), destination: 0 };
        loops.add_table(blocks.iter().map(pair));
    }
    for _ in 0..nests {
        let mut number = || fields.u64().ok_or(InvalidFrame::Cut);
        let (start, run, block) = (number()?, number()?, number()?);
        let mut small = || fields.u32().ok_or(InvalidFrame::Cut).map(|number| number as usize);
        let (table, depth) = (small()?, small()?);
        if depth > MAX_LOOPS {
            return Err(InvalidFrame::Loops(LoopsError::TooDeep(depth)));
        }
        let mut inner = [Loop::default(); MAX_LOOPS];
        for repeat in &mut inner[..depth] {
            let mut number = || fields.u64().ok_or(InvalidFrame::Cut);
            *repeat = Loop { count: number()?, source: number()?, destination: 0 };
        }
        let added = loops.add_nest((start, 0), run, (block, 0), &inner[..depth], table);
        added.map_err(InvalidFrame::Loops)?;
    }
    match loops.packed_bytes() {
        Some(bytes) if fields.0.is_empty() && (1..=most).contains(&bytes) => Ok(loops),
        bytes => Err(InvalidFrame::Length(bytes.unwrap_or(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Loops {
        let mut loops = Loops::default();
        let pair = |source| BlockPair { source, destination: 3 };
        let (one, two) = (loops.add_table([pair(7), pair(0)]), loops.add_table([pair(9)]));
        let repeat = Loop { count: 3, source: 100, destination: 7 };
        loops.add_nest((5000, 1), 16, (4096, 1), &[repeat, repeat], one).unwrap();
        loops.add_nest((9000, 2), 10, (0, 1), &[], two).unwrap();
        loops
    }

    #[test]
    fn the_sources_half_arrives() {
        let mut bytes = vec![];
        encode(&some(), &mut bytes);
        assert!(bytes.len() < 200, "{} bytes", bytes.len());
        let there = decode(&bytes, SLOT_BYTES).unwrap();
        let runs = |loops: &Loops| {
            loops.copies().map(|copy| (copy.source, copy.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(runs(&there), runs(&some()));
        assert_eq!(there.packed_bytes(), some().packed_bytes());
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut], SLOT_BYTES).is_err());
        }
        bytes.push(0);
        assert!(decode(&bytes, SLOT_BYTES).is_err());
    }

    #[test]
    fn what_is_too_much_is_refused_before_anything_is_made_of_it() {
        let mut large = Loops::default();
        let table = large.add_table([BlockPair::default()]);
        large.add_nest((0, 0), SLOT_BYTES + 1, (0, 0), &[], table).unwrap();
        let mut bytes = vec![];
        encode(&large, &mut bytes);
        assert_eq!(decode(&bytes, SLOT_BYTES), Err(InvalidFrame::Length(SLOT_BYTES + 1)));
        // Counts that nothing follows.
        let many = [u32::MAX.to_le_bytes(), 1u32.to_le_bytes()].concat();
        assert_eq!(decode(&many, SLOT_BYTES), Err(InvalidFrame::Length(u32::MAX.into())));
        let pairs = [1u32.to_le_bytes(), 1u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        assert_eq!(decode(&pairs, SLOT_BYTES), Err(InvalidFrame::Length(u32::MAX.into())));
        // A start beyond which nothing fits.
        let mut bytes = vec![];
        encode(&some(), &mut bytes);
        let at = bytes.windows(8).position(|window| window == 5000_u64.to_le_bytes()).unwrap();
        bytes[at..at + 8].copy_from_slice(&(u64::MAX - 100).to_le_bytes());
        assert!(matches!(decode(&bytes, SLOT_BYTES), Err(InvalidFrame::Loops(_))));
    }
}
