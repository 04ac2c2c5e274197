//! The process that is read.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvferry_layout::{Place, Region};
use kvferry_transport::Transport;
use kvferry_transport::cuda::driver::Card;
use kvferry_transport::cuda::{Cuda, CudaOptions};
use serde::{Deserialize, Serialize};

use super::Failure;
use super::memory::{Checker, Memory};

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    regions: Vec<u64>,
    mapped: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    bases: Vec<u64>,
    description: Vec<u8>,
}

/// Holds the memory that it is told to hold, until it is told otherwise.
pub(super) fn serve() -> Result<(), Failure> {
    let card = Card::open(0)?;
    let checker = Checker::new(&card)?;
    // The transport goes before the memory.
    let mut held: Option<(Cuda, Vec<Memory>)> = None;
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        if let Some((transport, memory)) = held.take() {
            drop(transport);
            drop(memory);
        }
        let transport = Cuda::new(&CudaOptions::default())?;
        let mut memory = vec![];
        for (number, &bytes) in order.regions.iter().enumerate() {
            let span = Memory::new(&card, bytes, order.mapped)?;
            checker.fill(&span, number)?;
            let region = Region { base: span.base, bytes, place: Place::Gpu(0) };
            // SAFETY: the memory is freed after the transport is dropped.
            unsafe { transport.register(region)? };
            memory.push(span);
        }
        let bases = memory.iter().map(|span| span.base).collect();
        let answer = Answer { bases, description: transport.describe()? };
        println!("{}", serde_json::to_string(&answer)?);
        held = Some((transport, memory));
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
    pub(super) fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe from the source")?);
        Ok(Self { input: child.stdin.take(), output, child })
    }

    /// Has it hold regions of these sizes; answers where, and its description.
    pub(super) fn hold(
        &mut self,
        regions: &[u64],
        mapped: bool,
    ) -> Result<(Vec<u64>, Vec<u8>), Failure> {
        let order = Order { regions: regions.to_vec(), mapped };
        let input = self.input.as_mut().ok_or("no pipe to the source")?;
        writeln!(input, "{}", serde_json::to_string(&order)?)?;
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
