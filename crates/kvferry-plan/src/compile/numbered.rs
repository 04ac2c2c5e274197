//! Distinct values by number.

use std::collections::HashMap;

/// Distinct values, numbered in the order of their first appearance.
pub(crate) struct Numbered<T> {
    pub(crate) list: Vec<T>,
    numbers: HashMap<T, usize>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { list: vec![], numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Numbered<T> {
    pub(crate) fn number(&mut self, value: T) -> usize {
        *self.numbers.entry(value.clone()).or_insert_with(|| {
            self.list.push(value);
            self.list.len() - 1
        })
    }
}
