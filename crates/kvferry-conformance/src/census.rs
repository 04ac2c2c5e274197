//! What this process holds of the system.

use std::fmt;
use std::fs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Census {
    pub(crate) threads: usize,
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
}

pub(crate) fn take() -> Census {
    let count = |directory: &str| fs::read_dir(directory).unwrap().count();
    Census {
        threads: count("/proc/self/task"),
        descriptors: count("/proc/self/fd"),
        mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.threads, self.descriptors, self.mappings)
    }
}
