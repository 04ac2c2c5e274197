//! The process that is read.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvferry_demo::own_output;
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{Error, Transport};
use serde::{Deserialize, Serialize};

use super::Failure;
use crate::bench::memory;

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
    // SAFETY: a plain request to the kernel: end this process with the one that started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // UCX writes its warnings to the standard output, which is spoken for.
    let mut output = own_output::take()?;
    // The transport goes before the memory.
    let mut held: Option<(T, Vec<HostMemory>)> = None;
    for line in std::io::stdin().lock().lines() {
        let sizes: Vec<u64> = serde_json::from_str(&line?)?;
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
        writeln!(output, "{}", serde_json::to_string(&answer)?)?;
        held = Some((transport, spans));
    }
    Ok(())
}

/// That process, from here.
pub(super) struct Source {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Source {
    pub(super) fn start(transport: &str) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "lowering", "--serve", transport])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe from the source")?);
        Ok(Self { input: child.stdin.take(), output, child })
    }

    /// Has it hold regions of these sizes; answers where, and its description.
    pub(super) fn hold(&mut self, regions: &[u64]) -> Result<(Vec<u64>, Vec<u8>), Failure> {
        let input = self.input.as_mut().ok_or("no pipe to the source")?;
        writeln!(input, "{}", serde_json::to_string(regions)?)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let answer: Answer = serde_json::from_str(&line)
            .map_err(|error| format!("the source says {line:?}: {error}"))?;
        Ok((answer.bases, answer.description))
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
