//! Nested loops around one contiguous run: how a part of a block is copied.

pub(crate) use kvferry_layout::Loop;
use kvferry_layout::strided::fuse;

/// The bytes from one block, kernel block or entry to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Steps {
    pub(crate) block: u64,
    pub(crate) kernel: u64,
    pub(crate) entry: u64,
}

/// The steps of both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BothSteps {
    pub(crate) source: Steps,
    pub(crate) destination: Steps,
}

/// The bytes of one entry that are copied, seen from slot 0 of block 0, and the way to other slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nest {
    pub(crate) source: u64,
    pub(crate) destination: u64,
    pub(crate) steps: BothSteps,
    pub(crate) run: u64,
    /// Sorted by the destination's stride, the largest first.
    pub(crate) loops: Vec<Loop>,
}

impl Nest {
    pub(crate) fn new(
        (source, destination): (u64, u64),
        steps: BothSteps,
        run: u64,
        loops: Vec<Loop>,
    ) -> Self {
        let mut nest = Self { source, destination, steps, run, loops };
        nest.loops.retain(|repeat| repeat.count > 1);
        nest.loops.sort_unstable_by_key(|repeat| std::cmp::Reverse(repeat.destination));
        let len = fuse(&mut nest.loops, &mut nest.run);
        nest.loops.truncate(len);
        nest
    }

    /// Appends `next` when the two make one longer nest: equal but for one loop (or the run), which
    /// `next` continues on both sides.
    pub(crate) fn append(&mut self, next: &Self) -> bool {
        let source = next.source.wrapping_sub(self.source);
        let destination = next.destination.wrapping_sub(self.destination);
        if self.steps != next.steps {
            return false;
        }
        if self.loops == next.loops && source == self.run && destination == self.run {
            self.run += next.run;
            let len = fuse(&mut self.loops, &mut self.run);
            self.loops.truncate(len);
            return true;
        }
        if self.run != next.run || self.loops.len() != next.loops.len() {
            return false;
        }
        let mut pairs = self.loops.iter().zip(&next.loops).enumerate();
        let strides =
            |(a, b): (&Loop, &Loop)| (a.source, a.destination) == (b.source, b.destination);
        if !self.loops.iter().zip(&next.loops).all(strides) {
            return false;
        }
        let continued = |repeat: &Loop| {
            repeat.count.checked_mul(repeat.source) == Some(source)
                && repeat.count.checked_mul(repeat.destination) == Some(destination)
        };
        // The loop that differs in count; where none does, any that `next` continues.
        let differing = pairs.clone().filter(|(_, (a, b))| a.count != b.count).count();
        let found =
            pairs.find(|(_, (a, b))| continued(a) && (differing == 0 || a.count != b.count));
        let Some((index, _)) = found.filter(|_| differing <= 1) else { return false };
        self.loops[index].count += next.loops[index].count;
        let len = fuse(&mut self.loops, &mut self.run);
        self.loops.truncate(len);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nest(at: u64, run: u64, loops: &[(u64, u64, u64)]) -> Nest {
        let loops =
            loops.iter().map(|&(count, source, destination)| Loop { count, source, destination });
        Nest::new((at, at + 1000), BothSteps::default(), run, loops.collect())
    }

    #[test]
    fn loops_that_continue_each_other_become_one_run() {
        assert_eq!(nest(0, 2, &[(4, 8, 8), (4, 2, 2)]), nest(0, 32, &[]));
        assert_eq!(nest(0, 2, &[(4, 20, 8), (4, 2, 2)]), nest(0, 8, &[(4, 20, 8)]));
        assert_eq!(nest(0, 2, &[(3, 12, 40), (4, 3, 10)]), nest(0, 2, &[(12, 3, 10)]));
    }

    #[test]
    fn values_beside_keys_make_one_nest() {
        let mut keys = nest(0, 8, &[(4, 64, 32)]);
        assert!(keys.append(&nest(8, 8, &[(4, 64, 32)])));
        assert_eq!(keys, nest(0, 16, &[(4, 64, 32)]));
        assert!(!keys.append(&nest(8, 8, &[(4, 64, 32)])));
    }

    #[test]
    fn sections_of_different_widths_make_one_nest() {
        let mut x = nest(0, 6, &[(100, 8, 8)]);
        assert!(x.append(&nest(800, 6, &[(20, 8, 8)])));
        assert_eq!(x, nest(0, 6, &[(120, 8, 8)]));
    }
}
