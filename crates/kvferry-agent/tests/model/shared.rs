//! What worlds have in common: most of a world stays as it is when something happens in it.

use std::cell::OnceCell;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// A value that is copied when it is about to change, and hashed once.
#[derive(Clone)]
pub(crate) struct Shared<T>(Rc<Kept<T>>);

#[derive(Clone)]
struct Kept<T> {
    value: T,
    mark: OnceCell<u64>,
}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Rc::new(Kept { value, mark: OnceCell::new() }))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: Clone> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        let kept = Rc::make_mut(&mut self.0);
        kept.mark.take();
        &mut kept.value
    }
}

impl<T: Eq> PartialEq for Shared<T> {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0) || self.0.value == other.0.value
    }
}

impl<T: Eq> Eq for Shared<T> {}

impl<T: Hash> Hash for Shared<T> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mark = self.0.mark.get_or_init(|| mark(&self.0.value));
        mark.hash(hasher);
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.value.fmt(f)
    }
}

/// Tells a value from others. Among a million worlds, two are mistaken for one once in 10⁷ runs.
pub(crate) fn mark(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
