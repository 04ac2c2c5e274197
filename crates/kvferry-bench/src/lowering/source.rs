//! The process that is read.

use kvferry_transport::memory::HostMemory;
use kvferry_transport::{Error, Transport};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::helper::{Helper, answer};
use crate::memory;

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    bases: Vec<u64>,
    description: Vec<u8>,
}

/// What the region number `region` is filled by.
pub(super) fn seed(region: usize) -> u64 {
    0x0123_4567_89ab_cdef ^ ((region as u64 + 1) << 48)
}

/// Holds the memory that it is told to hold, until it is told otherwise.
pub(super) fn serve<T: Transport>(make: impl Fn() -> Result<T, Error>) -> Result<(), Failure> {
    // The transport goes before the memory.
    let mut held: Option<(T, Vec<HostMemory>)> = None;
    answer(|sizes: Vec<u64>| {
        if let Some((transport, memory)) = held.take() {
            drop(transport);
            drop(memory);
        }
        let transport = make()?;
        let mut spans = vec![];
        for (number, &bytes) in sizes.iter().enumerate() {
            let span = HostMemory::new(bytes as usize)?;
            memory::fill(&span, seed(number));
            // SAFETY: the memory is only touched through its address, and freed after the transport.
            unsafe { transport.register(span.region())? };
            spans.push(span);
        }
        let bases = spans.iter().map(HostMemory::base).collect();
        let answer = Answer { bases, description: transport.describe()? };
        held = Some((transport, spans));
        Ok(answer)
    })
}

/// That process, from here.
pub(super) struct Source(Helper);

impl Source {
    pub(super) fn start(transport: &str) -> Result<Self, Failure> {
        Helper::start(&["lowering", "--serve", transport]).map(Self)
    }

    /// Has it hold regions of these sizes; answers where, and its description.
    pub(super) fn hold(&mut self, regions: &[u64]) -> Result<(Vec<u64>, Vec<u8>), Failure> {
        let Answer { bases, description } = self.0.ask(regions)?;
        Ok((bases, description))
    }
}
