//! A rank's memory, whose every byte is known.

use kvferry_layout::{Manifest, Piece, Place};
use kvferry_plan::BlockTable;

/// A pool, and beside it what it should hold.
pub(crate) struct Pool {
    manifest: Manifest,
    memory: Memory,
    shadow: Vec<u8>,
    /// What memory holds that no request has written; repeated over and over.
    poison: Vec<u8>,
}

/// A prime, so that no two blocks look alike.
const POISON_BYTES: usize = 65_521;

impl Pool {
    /// Memory for what a manifest describes, and the manifest of that memory.
    pub(crate) fn new(manifest: Manifest) -> Result<Self, String> {
        let mut draft = manifest.into_draft();
        let [region] = draft.regions.as_mut_slice() else {
            return Err("a rank of the demo has one region".to_owned());
        };
        let bytes = usize::try_from(region.bytes).map_err(|error| error.to_string())?;
        let poison: Vec<u8> = (0..POISON_BYTES as u64).map(|i| mix(1, i) as u8).collect();
        let shadow: Vec<u8> = poison.iter().copied().cycle().take(bytes).collect();
        // Never freed: it lives as long as the process.
        let base = Box::leak(shadow.clone().into_boxed_slice()).as_mut_ptr();
        let memory = Memory { base, bytes };
        (region.base, region.place) = (base as u64, Place::Host);
        let manifest = Manifest::new(draft).map_err(|error| error.to_string())?;
        Ok(Self { manifest, memory, shadow, poison })
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Base and length.
    pub(crate) fn span(&self) -> (u64, u64) {
        (self.memory.base as u64, self.memory.bytes as u64)
    }

    /// Writes what the model remembers of a request of `tokens` tokens.
    pub(crate) fn fill(&mut self, seed: u64, tokens: u64, tables: &[BlockTable]) {
        let (memory, cached) = (self.memory, vec![0; tables.len()]);
        needed(&self.manifest, seed, tokens, &cached, tables, |at, bytes| memory.write(at, bytes));
    }

    /// Overwrites all of the blocks of a request.
    pub(crate) fn scrub(&mut self, tables: &[BlockTable]) {
        let Self { manifest, memory, shadow, poison } = self;
        whole(manifest, tables, |mut at, mut bytes| {
            while bytes > 0 {
                let run = &poison[at % POISON_BYTES..];
                let run = &run[..run.len().min(bytes)];
                memory.write(at, run);
                shadow[at..at + run.len()].copy_from_slice(run);
                (at, bytes) = (at + run.len(), bytes - run.len());
            }
        });
    }

    /// Compares all bytes of a request's blocks: what was moved with what it should be, and the rest
    /// with what it was. Answers how many differ, and how many were compared.
    pub(crate) fn check(
        &mut self,
        seed: u64,
        tokens: u64,
        cached: &[u64],
        tables: &[BlockTable],
    ) -> (u64, u64) {
        let Self { manifest, memory, shadow, .. } = self;
        needed(manifest, seed, tokens, cached, tables, |at, bytes| {
            shadow[at..at + bytes.len()].copy_from_slice(bytes);
        });
        let (mut wrong, mut compared) = (0, 0);
        whole(manifest, tables, |at, bytes| {
            compared += bytes as u64;
            wrong += memory.differing(at, &shadow[at..at + bytes]);
        });
        (wrong, compared)
    }

    /// Bytes of the whole pool that are not what they should be.
    pub(crate) fn audit(&self) -> u64 {
        self.memory.differing(0, &self.shadow)
    }
}

/// A span of memory that is never freed. Peers write it at any time, but never where it is read or
/// written here: those blocks are at rest.
#[derive(Clone, Copy)]
struct Memory {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a span of memory that is never freed, accessed without references.
unsafe impl Send for Memory {}

impl Memory {
    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes, "pieces lie in their region");
        // SAFETY: inside the span, which is never freed; `bytes` is other memory.
        unsafe { self.base.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    fn differing(&self, at: usize, expected: &[u8]) -> u64 {
        assert!(at + expected.len() <= self.bytes, "pieces lie in their region");
        let mut found = vec![0; expected.len().min(1 << 16)];
        let mut differing = 0;
        for (chunk, expected) in expected.chunks(1 << 16).enumerate() {
            let found = &mut found[..expected.len()];
            // SAFETY: inside the span, which is never freed; `found` is other memory.
            unsafe {
                let from = self.base.add(at + (chunk << 16));
                from.copy_to_nonoverlapping(found.as_mut_ptr(), found.len());
            }
            if found != expected {
                let pairs = found.iter().zip(expected);
                differing += pairs.filter(|(found, expected)| found != expected).count() as u64;
            }
        }
        differing
    }
}

/// Every run of bytes that a transfer must bring, and its content.
fn needed(
    manifest: &Manifest,
    seed: u64,
    tokens: u64,
    cached: &[u64],
    tables: &[BlockTable],
    mut visit: impl FnMut(usize, &[u8]),
) {
    let mut content = vec![];
    for (g, group) in manifest.groups().iter().enumerate() {
        for (p, piece) in group.pieces.iter().enumerate() {
            let kind = manifest.kind(piece);
            let width = kind.format.bytes as usize;
            let state = hash(&piece.state);
            let live = kind.law.closed(group.window.first_live(tokens));
            let held = kind.law.held(cached[g], tokens);
            let slots = manifest.entries_per_block(g, p);
            for entry in live.max(held)..kind.law.entries(tokens) {
                if !piece.phase.holds(entry) {
                    continue;
                }
                let local = piece.phase.local(entry);
                let Some(block) = block_at(&tables[g], local / slots, group.null_block) else {
                    continue;
                };
                let key = mix(seed ^ state, entry);
                rows(manifest, piece, block, local % slots, |at, element, count| {
                    content.clear();
                    for element in element..element + count {
                        let value = mix(key, element).to_le_bytes();
                        content.extend(value.iter().cycle().take(width));
                    }
                    visit(at, &content);
                });
            }
        }
    }
}

/// Every run of bytes of every piece in a request's blocks.
fn whole(manifest: &Manifest, tables: &[BlockTable], mut visit: impl FnMut(usize, usize)) {
    for (g, group) in manifest.groups().iter().enumerate() {
        for (p, piece) in group.pieces.iter().enumerate() {
            let width = manifest.kind(piece).format.bytes as usize;
            for block in tables[g].blocks.iter().filter(|id| Some(**id) != group.null_block) {
                for slot in 0..manifest.entries_per_block(g, p) {
                    rows(manifest, piece, *block, slot, |at, _, count| {
                        visit(at, count as usize * width);
                    });
                }
            }
        }
    }
}

/// The elements of one entry of a piece, in runs that lie side by side: where, the number of the first
/// in the whole state, and how many.
fn rows(
    manifest: &Manifest,
    piece: &Piece,
    block: u32,
    slot: u64,
    mut visit: impl FnMut(usize, u64, u64),
) {
    let view = &piece.view;
    let inside = match &view.kernel {
        None => slot * view.entry,
        Some(kernel) => slot / kernel.entries * kernel.stride + slot % kernel.entries * view.entry,
    };
    let start = view.offset + u64::from(block) * view.block + inside;
    let kind = manifest.kind(piece);
    let spans = &piece.bounds.0;
    if spans.iter().any(kvferry_layout::Span::is_empty) {
        return;
    }
    // The last axis makes runs where its elements touch.
    let last = spans.len().checked_sub(1);
    let last = last.filter(|last| view.axes[*last] == u64::from(kind.format.bytes));
    let mut at: Vec<u64> = spans.iter().map(|span| span.start).collect();
    loop {
        let (mut offset, mut element) = (start, 0);
        for (axis, index) in at.iter().enumerate() {
            offset += (index - spans[axis].start) * view.axes[axis];
            element = element * kind.axes[axis].length + index;
        }
        visit(offset as usize, element, last.map_or(1, |last| spans[last].len()));
        let mut axis = last.unwrap_or(spans.len());
        loop {
            let Some(next) = axis.checked_sub(1) else { return };
            axis = next;
            at[axis] += 1;
            if at[axis] < spans[axis].end {
                break;
            }
            at[axis] = spans[axis].start;
        }
    }
}

fn block_at(table: &BlockTable, position: u64, null_block: Option<u32>) -> Option<u32> {
    let index = position.checked_sub(table.first)?;
    let block = *table.blocks.get(usize::try_from(index).ok()?)?;
    (Some(block) != null_block).then_some(block)
}

pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_add(b.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| mix(hash, u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use kvferry_models::Topology;
    use kvferry_plan::{Plan, Request, Table};

    use super::*;
    use crate::shape;

    /// One request from a pool of one rank to another, by plain copies.
    struct Moved {
        pool: Pool,
        tables: Vec<BlockTable>,
        /// Every byte that was written.
        written: Vec<usize>,
    }

    const TOKENS: u64 = 70;
    const SEED: u64 = 9;

    fn moved(model: &str, blocks: u32) -> Moved {
        let model = shape::reduced(model, 2).unwrap();
        let topology = Topology { blocks: Some(blocks), ..Topology::default() };
        let mut manifests = shape::engine(&model, &topology, "p").unwrap();
        let mut source = Pool::new(manifests.remove(0)).unwrap();
        let mut manifests = shape::engine(&model, &topology, "d").unwrap();
        let mut pool = Pool::new(manifests.remove(0)).unwrap();
        let mut next = 1;
        let tables: Vec<BlockTable> = pool
            .manifest()
            .groups()
            .iter()
            .map(|group| {
                let count = group.tokens_per_block.map_or(1, |block| TOKENS.div_ceil(block));
                let blocks = (next..next + count as u32).collect();
                next += count as u32;
                BlockTable { first: 0, blocks }
            })
            .collect();
        source.fill(SEED, TOKENS, &tables);
        pool.scrub(&tables);
        let borrowed: Vec<Table<'_>> = tables.iter().map(BlockTable::borrow).collect();
        let request = Request {
            tokens: TOKENS,
            cached: &vec![0; tables.len()],
            source: &borrowed,
            destination: &borrowed,
        };
        let plan = Plan::compile(pool.manifest(), &[source.manifest()]).unwrap();
        let transfer = plan.transfer(&request).unwrap();
        let mut written = vec![];
        for copy in transfer.loops(0).unwrap().copies() {
            let from = (copy.source - source.span().0) as usize;
            let to = (copy.destination - pool.span().0) as usize;
            let bytes: Vec<u8> =
                (from..from + copy.bytes as usize).map(|at| source.at(at)).collect();
            pool.memory.write(to, &bytes);
            written.extend(to..to + bytes.len());
        }
        Moved { pool, tables, written }
    }

    impl Pool {
        fn at(&self, at: usize) -> u8 {
            assert!(at < self.memory.bytes);
            // SAFETY: inside the span, which is never freed.
            unsafe { self.memory.base.add(at).read() }
        }

        fn flip(&self, at: usize) {
            self.memory.write(at, &[!self.at(at)]);
        }
    }

    #[test]
    fn what_a_plan_moves_is_right() {
        // As few blocks as the request needs, and some: all of a pool is compared.
        for (model, blocks) in
            [("llama-3.1-8b", 64), ("kimi-linear-48b-a3b", 12), ("gemma-3-27b", 64)]
        {
            let mut moved = moved(model, blocks);
            let cached = vec![0; moved.tables.len()];
            let (wrong, compared) = moved.pool.check(SEED, TOKENS, &cached, &moved.tables);
            assert_eq!(wrong, 0, "{model}");
            assert!(compared >= moved.written.len() as u64);
            assert_eq!(moved.pool.audit(), 0);
        }
    }

    /// Every single byte counts: one that was moved, one of the same blocks, one of the rest.
    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        let check = |moved: &mut Moved| {
            let cached = vec![0; moved.tables.len()];
            moved.pool.check(SEED, TOKENS, &cached, &moved.tables).0
        };
        let mut first = moved("llama-3.1-8b", 64);
        first.pool.flip(first.written[first.written.len() / 2]);
        assert_eq!(check(&mut first), 1);
        assert_eq!(first.pool.audit(), 1);

        let mut second = moved("llama-3.1-8b", 64);
        let written: std::collections::HashSet<usize> = second.written.iter().copied().collect();
        let mut beside = None;
        whole(second.pool.manifest(), &second.tables, |at, bytes| {
            beside = beside.or_else(|| (at..at + bytes).find(|at| !written.contains(at)));
        });
        second.pool.flip(beside.expect("the last block is not full"));
        assert_eq!(check(&mut second), 1);

        let mut third = moved("llama-3.1-8b", 64);
        third.pool.flip(third.pool.memory.bytes - 1);
        assert_eq!(check(&mut third), 0, "no block of this request");
        assert_eq!(third.pool.audit(), 1);
    }

    /// A request that was never moved is wrong from end to end.
    #[test]
    fn nothing_moved_is_nothing_right() {
        let mut moved = moved("llama-3.1-8b", 64);
        moved.pool.scrub(&moved.tables);
        let cached = vec![0; moved.tables.len()];
        let (wrong, _) = moved.pool.check(SEED, TOKENS, &cached, &moved.tables);
        assert!(wrong * 10 > moved.written.len() as u64 * 9, "{wrong}");
    }
}
