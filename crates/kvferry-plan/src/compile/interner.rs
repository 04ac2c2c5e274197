//! Distinct values by number.

use std::collections::HashMap;

/// Distinct values, numbered in the order of their first appearance.
pub(crate) struct Interner<T> {
    pub(crate) list: Vec<T>,
    numbers: HashMap<T, usize>,
    /// The number that was given last: neighbours are mostly alike, and hashing takes longer than looking.
    last: usize,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { list: vec![], numbers: HashMap::new(), last: 0 }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Interner<T> {
    pub(crate) fn number(&mut self, value: T) -> usize {
        if self.list.get(self.last) != Some(&value) {
            self.last = *self.numbers.entry(value.clone()).or_insert_with(|| {
                self.list.push(value);
                self.list.len() - 1
            });
        }
        self.last
    }
}
