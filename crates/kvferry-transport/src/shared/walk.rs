//! Loops carried out by the CPU, fast: how packed reads gather and scatter.

use kvferry_layout::{Loop, Loops, MAX_LOOPS};

/// Moves the bytes that loops describe, from and to memory of this process.
///
/// # Safety
///
/// Every byte within the [extents](kvferry_layout::LoopNest::extents) of every nest must be valid for
/// reads on the source and for writes on the destination, the two must not overlap, and no reference
/// to them may exist. Others may change the source meanwhile: then what is moved is a mixture.
pub unsafe fn carry_out(loops: &Loops) {
    for nest in loops.nests() {
        let (innermost, around) = match nest.loops {
            [around @ .., innermost] => (*innermost, around),
            [] => (Loop { count: 1, source: 0, destination: 0 }, &[][..]),
        };
        for pair in nest.pairs {
            let mut from = nest.source + u64::from(pair.source) * nest.blocks.0;
            let mut to = nest.destination + u64::from(pair.destination) * nest.blocks.1;
            let mut indices = [0; MAX_LOOPS];
            'rows: loop {
                // SAFETY: a row of a nest lies within its extents, for which the caller vouches.
                unsafe { row(from, to, nest.run, innermost) };
                for (repeat, index) in std::iter::zip(around, &mut indices).rev() {
                    *index += 1;
                    if *index < repeat.count {
                        from += repeat.source;
                        to += repeat.destination;
                        continue 'rows;
                    }
                    from -= (repeat.count - 1) * repeat.source;
                    to -= (repeat.count - 1) * repeat.destination;
                    *index = 0;
                }
                break;
            }
        }
    }
}

/// Runs of equal length, evenly apart.
///
/// # Safety
///
/// As of [`carry_out`], for all of the runs.
#[inline(always)]
unsafe fn row(from: u64, to: u64, run: u64, repeat: Loop) {
    // SAFETY: the caller's promise. Short runs are moved as one word, which need not be aligned.
    unsafe {
        match run {
            1 => words::<u8>(from, to, repeat),
            2 => words::<u16>(from, to, repeat),
            4 => words::<u32>(from, to, repeat),
            8 => words::<u64>(from, to, repeat),
            16 => words::<u128>(from, to, repeat),
            32 => words::<[u128; 2]>(from, to, repeat),
            64 => words::<[u128; 4]>(from, to, repeat),
            _ => {
                let (mut from, mut to) = (from, to);
                for _ in 0..repeat.count {
                    (to as *mut u8).copy_from_nonoverlapping(from as *const u8, run as usize);
                    from = from.wrapping_add(repeat.source);
                    to = to.wrapping_add(repeat.destination);
                }
            }
        }
    }
}

/// # Safety
///
/// As of [`row`], for runs of the size of `T`.
#[inline(always)]
unsafe fn words<T: Copy>(mut from: u64, mut to: u64, repeat: Loop) {
    for _ in 0..repeat.count {
        // SAFETY: the caller's promise; neither side need be aligned.
        unsafe { (to as *mut T).write_unaligned((from as *const T).read_unaligned()) };
        from = from.wrapping_add(repeat.source);
        to = to.wrapping_add(repeat.destination);
    }
}

#[cfg(test)]
mod tests {
    use kvferry_layout::BlockPair;
    use proptest::prelude::*;

    use super::*;
    use crate::memory::HostMemory;

    const BYTES: usize = 1 << 16;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Whatever the lengths and strides: what lies where afterwards is what the list of copies says,
        /// and every other byte is as it was.
        #[test]
        fn walking_is_what_the_list_says(
            blocks in prop::collection::vec((0u32..5, 0u32..5), 1..4),
            run in prop_oneof![1u64..70, Just(64), Just(32), Just(16), Just(8), Just(4), Just(2), Just(1)],
            strides in prop::collection::vec((1u64..4, 0u64..300, 0u64..300), 0..5),
            start in (0u64..100, 0u64..100),
        ) {
            let (source, destination) = (HostMemory::new(BYTES).unwrap(), HostMemory::new(BYTES).unwrap());
            let content: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
            source.write(0, &content);
            let mut loops = Loops::default();
            let pairs = blocks.into_iter().map(|(source, destination)| BlockPair { source, destination });
            let table = loops.add_table(pairs);
            let inner: Vec<Loop> =
                strides.iter().map(|&(count, source, destination)| Loop { count, source, destination }).collect();
            let at = (source.base() + start.0, destination.base() + start.1);
            loops.add_nest(at, run, (1000, 2000), &inner, table).unwrap();
            // SAFETY: all of it lies in the two blocks, to which no reference exists.
            unsafe { carry_out(&loops) };
            let mut expected = vec![0; BYTES];
            // In the order of the walk, which matters where runs overlap on the destination.
            let nest = loops.nest_at(0).unwrap();
            for pair in nest.pairs {
                let mut indices = vec![0; inner.len()];
                loop {
                    let mut from = start.0 + u64::from(pair.source) * 1000;
                    let mut to = start.1 + u64::from(pair.destination) * 2000;
                    for (index, repeat) in std::iter::zip(&indices, &inner) {
                        from += index * repeat.source;
                        to += index * repeat.destination;
                    }
                    let (from, to, run) = (from as usize, to as usize, run as usize);
                    expected[to..to + run].copy_from_slice(&content[from..from + run]);
                    let Some(next) = (0..inner.len()).rev().find(|&l| indices[l] + 1 < inner[l].count) else { break };
                    indices[next] += 1;
                    indices[next + 1..].fill(0);
                }
            }
            prop_assert!(destination.snapshot() == expected);
        }
    }
}
