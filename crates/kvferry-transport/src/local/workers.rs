//! The threads that copy.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::direct::Direct;
use super::process::MAX_ENTRIES;
use crate::contract::Error;
use crate::shared::chunks::Chunked;
use crate::shared::thread::{outlive, unless_it_panics};

/// Bytes per call to the kernel: few enough to spread an operation over the workers and to be
/// cancelled soon.
const CHUNK_BYTES: u64 = 4 << 20;

/// The workers and their queue. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closing: bool,
}

#[derive(Debug)]
struct Job {
    operation: Arc<Chunked>,
    from: Arc<Direct>,
}

impl Workers {
    pub(super) fn start(count: usize) -> Result<Self, Error> {
        let mut workers = Self { shared: Arc::default(), threads: Vec::new() };
        for number in 0..count.max(1) {
            let shared = workers.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("kvferry-copy{number}"))
                .spawn(move || outlive("copying", || shared.run()))
                .map_err(|error| Error::system("starting a thread", &error))?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    pub(super) fn post(&self, operation: Arc<Chunked>, from: Arc<Direct>) {
        self.shared.push(Job { operation, from });
    }

    /// Ends the operations of one peer that wait in line.
    pub(super) fn forget(&self, peer: &Arc<Direct>) {
        let mut gone = Vec::new();
        self.shared.queue.lock().jobs.retain(|job| {
            let keep = !Arc::ptr_eq(&job.from, peer);
            if !keep {
                gone.push(job.operation.clone());
            }
            keep
        });
        for operation in gone {
            operation.custody().stop(Error::Disconnected);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let jobs = {
            let mut queue = self.shared.queue.lock();
            queue.closing = true;
            std::mem::take(&mut queue.jobs)
        };
        self.shared.work.notify_all();
        for job in jobs {
            job.operation.custody().stop(Error::Disconnected);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn push(&self, job: Job) {
        let mut queue = self.queue.lock();
        if queue.closing || job.from.is_closed() {
            drop(queue);
            job.operation.custody().stop(Error::Disconnected);
            return;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.work.notify_one();
    }

    /// A worker's life.
    fn run(&self) {
        let mut ours = Vec::with_capacity(MAX_ENTRIES);
        let mut theirs = Vec::with_capacity(MAX_ENTRIES);
        while let Some(Job { operation, from }) = self.next() {
            // One entry is left for the proof of identity.
            let Some((chunk, more)) = operation.take(MAX_ENTRIES - 1, CHUNK_BYTES) else {
                continue;
            };
            if more {
                self.push(Job { operation: operation.clone(), from: from.clone() });
            }
            // The call returns when the bytes are there: after a panic nothing lands, either.
            let read = unless_it_panics("a copy", || {
                from.read(operation.custody(), &chunk, &mut ours, &mut theirs)
            });
            match read {
                Some(Ok(())) => chunk.in_place(),
                Some(Err(error)) => chunk.fail(error),
                None => {
                    chunk.fail(Error::Library("the thread that copies has panicked".to_owned()));
                }
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closing {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            self.work.wait(&mut queue);
        }
    }
}
