//! Memory that peers may read to measure how long reads take, before anything depends on it.

use parking_lot::Mutex;

use crate::contract::Error;
use crate::memory::HostMemory;

/// How much there is.
pub(crate) const BYTES: u64 = 1 << 20;

/// Ones, which nobody changes.
#[derive(Debug)]
pub(crate) struct Practice {
    base: u64,
    _memory: Mutex<HostMemory>,
}

impl Practice {
    pub(crate) fn new() -> Result<Self, Error> {
        let memory = HostMemory::new(BYTES as usize)
            .map_err(|error| Error::system("mapping memory to practise with", &error))?;
        // Pages that were never written are all the same one, and faster than any others.
        memory.write(0, &[1; BYTES as usize]);
        Ok(Self { base: memory.base(), _memory: Mutex::new(memory) })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Moves spans that count from 0 to where the memory is. Otherwise the first that lies outside.
    pub(crate) fn place(&self, spans: &mut [(u64, u64)]) -> Result<(), u64> {
        for (at, bytes) in spans {
            if at.checked_add(*bytes).is_none_or(|end| end > BYTES) {
                return Err(*at);
            }
            *at += self.base;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_practice_memory_is_reached() {
        let practice = Practice::new().unwrap();
        let mut spans = [(0, BYTES), (BYTES - 1, 1)];
        assert_eq!(practice.place(&mut spans), Ok(()));
        assert_eq!(spans, [(practice.base(), BYTES), (practice.base() + BYTES - 1, 1)]);
        for outside in [(0, BYTES + 1), (BYTES, 1), (u64::MAX, 2)] {
            assert_eq!(practice.place(&mut [outside]), Err(outside.0));
        }
    }
}
