//! Digests of host memory.

#![allow(unsafe_code, reason = "memory that is named by its address is read here")]

use crate::Digest;
use crate::dot::{Dot, MOST_CHUNKS, WORDS, choose, whole};
use crate::field::{Pair, add, fold, multiply, reduced};
use crate::program::{Level, Nest, Program, Run, Weights};

/// How many bytes may pass before `stop` is asked again.
const GLANCE: u64 = 4 << 20;

/// The digests of a program's parts. `None`: `stop` answered yes, which it is asked now and then.
///
/// # Safety
///
/// Every byte of every [extent](Program::extents) must be readable host memory meanwhile. It may
/// change, which makes the digests those of no moment.
pub unsafe fn digest(program: &Program, stop: &dyn Fn() -> bool) -> Option<Vec<Digest>> {
    let mut sums = vec![[0, 0]; program.parts()];
    let dot = choose();
    let mut since = 0;
    for nest in program.nests() {
        let adder =
            Adder { dot, keys: program.keys(), run: nest.run, weights: program.weights(nest) };
        let mut levels = nest.levels.clone();
        // Entries are the widest loop, the narrowest, or between: in the order of addresses.
        let at = levels.partition_point(|level| level.stride > nest.entry);
        levels.insert(at, Level { count: 0, stride: nest.entry, keys: 0 });
        let mut sum = [0, 0];
        for stretch in &program.course(nest).stretches {
            (levels[at].count, levels[at].keys) = (stretch.count, stretch.keys);
            // SAFETY: a run of the program, as the caller promises.
            sum = add(sum, reduced(unsafe { adder.add_up(&levels, nest.address(stretch)) }));
            since += stretch.count * bytes_of_an_entry(nest);
            if since >= GLANCE {
                since = 0;
                if stop() {
                    return None;
                }
            }
        }
        sums[nest.part] = add(sums[nest.part], multiply(sum, nest.scale));
    }
    Some(program.digests(&sums))
}

fn bytes_of_an_entry(nest: &Nest) -> u64 {
    let runs: u64 = nest.levels.iter().map(|level| level.count).product();
    runs * nest.run.count * nest.run.bytes
}

/// So many products of 122 bits and a little can be added up.
const MOST_PRODUCTS: usize = 32;

struct Adder<'a> {
    dot: Dot,
    keys: &'a [Pair],
    run: Run,
    weights: &'a Weights,
}

impl Adder<'_> {
    /// At most the prime and 7, twice.
    ///
    /// # Safety
    ///
    /// All runs of the levels must be readable.
    unsafe fn add_up(&self, levels: &[Level], address: u64) -> Pair {
        let [level, inner @ ..] = levels else {
            // SAFETY: the caller's promise.
            return unsafe { self.run(address) };
        };
        let keys = &self.keys[level.keys..][..level.count as usize];
        let mut sum = [0; 2];
        let mut at = address;
        for keys in keys.chunks(MOST_PRODUCTS) {
            let mut wide = sum.map(u128::from);
            for key in keys {
                // Said apart from the rest, so that it is inlined here.
                let value = if inner.is_empty() {
                    // SAFETY: the caller's promise.
                    unsafe { self.run(at) }
                } else {
                    // SAFETY: as above.
                    unsafe { self.add_up(inner, at) }
                };
                wide[0] += u128::from(value[0]) * u128::from(key[0]);
                wide[1] += u128::from(value[1]) * u128::from(key[1]);
                at = at.wrapping_add(level.stride);
            }
            sum = wide.map(fold);
        }
        sum
    }

    /// # Safety
    ///
    /// The run must be readable.
    #[inline(always)]
    unsafe fn run(&self, address: u64) -> Pair {
        let Run { count, stride, bytes, shift, .. } = self.run;
        if count == 1 && shift == 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.words(address, bytes as usize) };
        }
        let mut sum = [0, 0];
        for element in 0..count {
            let place = shift + element * bytes;
            // SAFETY: the caller's promise.
            sum = add(sum, unsafe { self.shifted(address + element * stride, bytes, place) });
        }
        sum
    }

    /// A run that starts with a word.
    ///
    /// # Safety
    ///
    /// The run must be readable.
    #[inline(always)]
    unsafe fn words(&self, address: u64, bytes: usize) -> Pair {
        let start = address as *const u8;
        let (full, rest) = (bytes / (4 * WORDS), bytes % (4 * WORDS));
        if rest == 0 && full <= MOST_CHUNKS {
            // SAFETY: as below.
            return whole(&unsafe { (self.dot)(start, &self.weights.chunks[..full]) });
        }
        let mut sum = [0, 0];
        let mut done = 0;
        for chunks in self.weights.chunks[..full].chunks(MOST_CHUNKS) {
            // SAFETY: as many chunks as there are bytes for, of the readable run; chosen for this
            // processor.
            let sums = unsafe { (self.dot)(start.add(done), chunks) };
            sum = add(sum, reduced(whole(&sums)));
            done += chunks.len() * 4 * WORDS;
        }
        if rest > 0 {
            // SAFETY: the rest of the readable run.
            sum =
                add(sum, unsafe { self.shifted(address + done as u64, rest as u64, done as u64) });
        }
        sum
    }

    /// Bytes from `place` of the run's words on.
    ///
    /// # Safety
    ///
    /// The bytes must be readable.
    unsafe fn shifted(&self, address: u64, bytes: u64, place: u64) -> Pair {
        let mut wide = [0u128; 2];
        let (mut at, end) = (0, bytes);
        while at < end {
            let within = (place + at) % 4;
            let count = (4 - within).min(end - at);
            let mut word = [0; 4];
            // SAFETY: `count` readable bytes, into as many of an array of its own.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (address + at) as *const u8,
                    word.as_mut_ptr().add(within as usize),
                    count as usize,
                );
            }
            let word = u128::from(u32::from_le_bytes(word));
            let weight = &self.weights.words[((place + at) / 4) as usize];
            // 93 bits each: millions of them fit.
            wide[0] += word * u128::from(weight[0]);
            wide[1] += word * u128::from(weight[1]);
            at += count;
        }
        wide.map(fold)
    }
}
