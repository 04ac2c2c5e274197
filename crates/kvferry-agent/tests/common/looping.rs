//! A transport in one process that walks loops, as a GPU does.

use std::time::Instant;

use kvferry_agent::{Carrier, Source};
use kvferry_cuda::carry_out;
use kvferry_digest::{Digest, Program};
use kvferry_transport::{Error, Loops, Operation, Report, Status};

use super::memory::look;

#[derive(Debug)]
pub struct Looping;

impl Carrier for Looping {
    fn name(&self) -> &'static str {
        "looping"
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        Ok(vec![])
    }

    fn connect(&self, _: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
        Ok(Box::new(LoopingSource))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        look(program, deadline)
    }
}

#[derive(Debug)]
struct LoopingSource;

impl Source for LoopingSource {
    fn read(&self, loops: &Loops, _: Instant) -> Result<Box<dyn Operation>, Error> {
        // SAFETY: plans name only addresses of test memory, which is never freed and accessed without
        // references.
        unsafe { carry_out(loops) };
        let report = Report { bytes: loops.bytes(), ..Report::default() };
        Ok(Box::new(Done(report)))
    }

    fn disconnect(&self) {}
}

#[derive(Debug)]
struct Done(Report);

impl Operation for Done {
    fn poll(&self) -> Status {
        Status::Done(self.0)
    }

    fn wait(&self, _: Instant) -> Status {
        self.poll()
    }

    fn cancel(&self) {}
}
