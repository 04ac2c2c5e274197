//! Memory on a card, with content that can be checked.

use std::ffi::c_void;

use kvferry_cuda::driver::{Card, Kernel, Mapped, Module, Stream};
use kvferry_cuda::nvrtc;
use kvferry_plan::ByteCopy;

use crate::Failure;

const POISON: u8 = 0xa5;
const SHAPE: (u32, u32) = (1056, 512);
/// The driver is asked for multiples of this many bytes, as PyTorch asks it, from which engines have their memory.
const GRAIN: u64 = 2 << 20;

/// One span of a card's memory.
pub(super) struct Memory {
    card: Card,
    pub(super) base: u64,
    pub(super) bytes: u64,
    mapped: Option<Mapped>,
}

impl Memory {
    /// Plain memory, or memory from the virtual-memory interface in several parts.
    pub(super) fn new(card: &Card, bytes: u64, mapped: bool) -> Result<Self, Failure> {
        if mapped {
            let mapped = card.allocate_mapped(bytes, 3)?;
            return Ok(Self {
                card: card.clone(),
                base: mapped.base(),
                bytes,
                mapped: Some(mapped),
            });
        }
        let base = card.allocate(bytes.next_multiple_of(GRAIN))?;
        Ok(Self { card: card.clone(), base, bytes, mapped: None })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.mapped.is_none() {
            // SAFETY: allocated for this value; whoever drops it has ended what used it.
            let _ = unsafe { self.card.free(self.base) };
        }
    }
}

/// The kernels that fill and check memory.
pub(super) struct Checker {
    pub(super) card: Card,
    pub(super) stream: Stream,
    fill: Kernel,
    check: Kernel,
    clean: Kernel,
    _module: Module,
}

/// A kernel's argument, by its address.
pub(super) fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

impl Checker {
    pub(super) fn new(card: &Card) -> Result<Self, Failure> {
        let source = include_str!("check.cu");
        let module = card.module(&nvrtc::compile("check.cu", source, &[], card.capability()?)?)?;
        Ok(Self {
            card: card.clone(),
            stream: card.stream(false)?,
            fill: module.kernel("fill", 0)?,
            check: module.kernel("check", 0)?,
            clean: module.kernel("clean", 0)?,
            _module: module,
        })
    }

    /// Fills memory as region number `seed`.
    pub(super) fn fill(&self, memory: &Memory, seed: usize) -> Result<(), Failure> {
        let (mut base, mut words, mut seed) = (memory.base, memory.bytes / 8, seed as u64);
        let mut arguments = [argument(&mut base), argument(&mut words), argument(&mut seed)];
        // SAFETY: the arguments are the kernel's, and the memory is there until the end of the call.
        unsafe { self.stream.launch(&self.fill, SHAPE, 0, &mut arguments)? };
        Ok(self.stream.synchronize()?)
    }

    pub(super) fn poison(&self, memory: &Memory) -> Result<(), Failure> {
        // SAFETY: the memory is there until the end of the call.
        unsafe { self.stream.fill(memory.base, POISON, memory.bytes)? };
        Ok(self.stream.synchronize()?)
    }

    /// Checks that the copies, and nothing else, were carried out into poisoned memory, from regions
    /// that were filled; leaves only poison. Answers how many bytes are wrong.
    pub(super) fn check(
        &self,
        memory: &[Memory],
        copies: &[ByteCopy],
        regions: &[(u64, u64)],
    ) -> Result<u64, Failure> {
        let words: Vec<u8> = copies
            .iter()
            .flat_map(|copy| [copy.source, copy.destination, copy.bytes])
            .flat_map(u64::to_le_bytes)
            .collect();
        let spans: Vec<u8> = regions
            .iter()
            .flat_map(|&(base, bytes)| [base, bytes])
            .flat_map(u64::to_le_bytes)
            .collect();
        let (list, table, wrong) = (
            Memory::new(&self.card, words.len().max(8) as u64, false)?,
            Memory::new(&self.card, spans.len().max(8) as u64, false)?,
            Memory::new(&self.card, 8, false)?,
        );
        // SAFETY: all three were allocated just now, as long as this.
        unsafe {
            self.card.upload(list.base, &words)?;
            self.card.upload(table.base, &spans)?;
            self.card.upload(wrong.base, &[0; 8])?;
        }
        let (mut list_base, mut count) = (list.base, copies.len() as u64);
        let (mut table_base, mut region_count) = (table.base, regions.len() as u32);
        let (mut poison, mut wrong_base) = (POISON, wrong.base);
        let mut arguments = [
            argument(&mut list_base),
            argument(&mut count),
            argument(&mut table_base),
            argument(&mut region_count),
            argument(&mut poison),
            argument(&mut wrong_base),
        ];
        // SAFETY: the arguments are the kernel's, and all memory is there until the end of the call.
        unsafe { self.stream.launch(&self.check, SHAPE, 0, &mut arguments)? };
        for span in memory {
            let (mut base, mut bytes) = (span.base, span.bytes);
            let mut arguments = [
                argument(&mut base),
                argument(&mut bytes),
                argument(&mut poison),
                argument(&mut wrong_base),
            ];
            // SAFETY: as above.
            unsafe { self.stream.launch(&self.clean, SHAPE, 0, &mut arguments)? };
        }
        self.stream.synchronize()?;
        let mut found = [0; 8];
        // SAFETY: allocated above, and the kernels that write it have ended.
        unsafe { self.card.download(&mut found, wrong.base)? };
        Ok(u64::from_le_bytes(found))
    }
}
