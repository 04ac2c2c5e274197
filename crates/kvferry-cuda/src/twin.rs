//! Loops carried out by the CPU: what the kernel must do, said as simply as possible.

use kvferry_layout::Loops;

/// Moves the bytes that loops describe, from and to memory of this process.
///
/// # Safety
///
/// Every byte within the [extents](kvferry_layout::LoopNest::extents) of every nest must be valid for
/// reads on the source and for writes on the destination, the two must not overlap, and no reference
/// to them may exist.
pub unsafe fn carry_out(loops: &Loops) {
    for nest in loops.nests() {
        for pair in nest.pairs {
            let source = nest.source + u64::from(pair.source) * nest.blocks.0;
            let destination = nest.destination + u64::from(pair.destination) * nest.blocks.1;
            let mut indices = [0; kvferry_layout::MAX_LOOPS];
            'runs: loop {
                let at = std::iter::zip(nest.loops, indices);
                let (from, to) = at.fold((source, destination), |(from, to), (repeat, index)| {
                    (from + index * repeat.source, to + index * repeat.destination)
                });
                // SAFETY: a run of the nest lies within its extents, for which the caller vouches.
                unsafe {
                    let to = to as *mut u8;
                    to.copy_from_nonoverlapping(from as *const u8, nest.run as usize);
                }
                for (repeat, index) in std::iter::zip(nest.loops, &mut indices).rev() {
                    *index += 1;
                    if *index < repeat.count {
                        continue 'runs;
                    }
                    *index = 0;
                }
                break;
            }
        }
    }
}
