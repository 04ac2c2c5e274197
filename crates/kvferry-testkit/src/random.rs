//! Seeded randomness: one seed, one case, on every machine.

/// A source of random choices (SplitMix64). Not for secrets.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The dice of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    // Whole pools are filled with these.
    #[inline]
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from `low` to `high`, both included.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "no number from {low} to {high}");
        low + self.any() % (high - low + 1)
    }

    /// An index of something that has `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        self.within(0, len as u64 - 1) as usize
    }

    /// True in `percent` of a hundred throws.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.any() % 100 < percent
    }

    /// One of the choices.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())].clone()
    }

    /// Puts the elements in a random order.
    pub fn shuffle<T>(&mut self, elements: &mut [T]) {
        for last in (1..elements.len()).rev() {
            elements.swap(last, self.index(last + 1));
        }
    }
}
