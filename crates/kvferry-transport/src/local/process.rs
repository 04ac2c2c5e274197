//! Another process's memory, through the kernel.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::contract::Error;
use crate::tcp::Generation;

/// How many entries the kernel takes in one call.
pub(crate) const MAX_ENTRIES: usize = 1024;

/// What a process lets its peers read at a known address, to prove that it is the one they mean and
/// that its regions are the ones they know.
///
/// A read ends with this: the kernel looks the process up once per call, so the nonce proves that
/// all bytes before it came from the same process, however often its number was given out again,
/// and the generation proves that the regions had not changed when those bytes had been read.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Identity {
    nonce: [u8; 16],
    generation: AtomicU64,
}

impl Identity {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn new(nonce: [u8; 16]) -> Self {
        Self { nonce, generation: AtomicU64::new(0) }
    }

    /// The regions have changed.
    pub(crate) fn advance(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}

impl Generation for Identity {
    fn get(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }
}

/// Another process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: libc::pid_t,
    identity: u64,
    nonce: [u8; 16],
}

impl Process {
    /// Finds the process and checks that its memory can be read and that it is the one meant.
    pub(crate) fn find(pid: u32, identity: u64, nonce: [u8; 16]) -> Result<Self, Error> {
        let pid = libc::pid_t::try_from(pid)
            .map_err(|_| Error::BadDescription("its process number is not one".to_owned()))?;
        let process = Self { pid, identity, nonce };
        process.generation()?;
        Ok(process)
    }

    /// Reads the generation of its regions, and thereby checks who it is.
    pub(crate) fn generation(&self) -> Result<u64, Error> {
        // SAFETY: no entries besides the ones `read` adds itself.
        unsafe { self.read(&mut Vec::new(), &mut Vec::new(), 0) }
    }

    /// Fills the `ours` entries from the `theirs` entries, `bytes` in all and at most one less than
    /// [`MAX_ENTRIES`] each, and returns the generation of the regions after the last byte.
    ///
    /// # Safety
    ///
    /// The kernel writes the memory that `ours` names: it must be memory that may be written by
    /// anyone, at any time.
    pub(crate) unsafe fn read(
        &self,
        ours: &mut Vec<libc::iovec>,
        theirs: &mut Vec<libc::iovec>,
        bytes: u64,
    ) -> Result<u64, Error> {
        let mut seen = [0u8; Identity::BYTES];
        ours.push(libc::iovec { iov_base: seen.as_mut_ptr().cast(), iov_len: seen.len() });
        theirs.push(libc::iovec {
            iov_base: self.identity as *mut libc::c_void,
            iov_len: seen.len(),
        });
        // SAFETY: both arrays are live and of the lengths given; the entries of `ours` are the
        // caller's promise and `seen`; those of `theirs` are addresses of another process, which
        // the kernel checks.
        let moved = unsafe {
            libc::process_vm_readv(
                self.pid,
                ours.as_ptr(),
                ours.len() as libc::c_ulong,
                theirs.as_ptr(),
                theirs.len() as libc::c_ulong,
                0,
            )
        };
        self.check(moved, bytes + seen.len() as u64)?;
        if seen[..16] != self.nonce {
            return Err(Error::PeerLost(format!(
                "process {} is not the one that gave the description",
                self.pid
            )));
        }
        let mut generation = [0; 8];
        generation.copy_from_slice(&seen[16..]);
        Ok(u64::from_ne_bytes(generation))
    }

    fn check(&self, moved: isize, bytes: u64) -> Result<(), Error> {
        let pid = self.pid;
        let error = match u64::try_from(moved) {
            Ok(moved) if moved == bytes => return Ok(()),
            Ok(moved) => {
                return Err(Error::PeerLost(format!(
                    "reading the memory of process {pid} ended after {moved} of {bytes} bytes"
                )));
            }
            Err(_) => io::Error::last_os_error(),
        };
        let what = format!("reading the memory of process {pid}");
        match error.raw_os_error() {
            Some(libc::ESRCH | libc::EFAULT) => Err(Error::PeerLost(format!("{what}: {error}"))),
            _ => Err(Error::system(what, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_nonce_and_not_by_its_number() {
        let identity = Identity::new([7; 16]);
        let at = &raw const identity as u64;
        let pid = std::process::id();
        let process = Process::find(pid, at, [7; 16]).unwrap();
        assert_eq!(process.generation(), Ok(0));
        identity.advance();
        assert_eq!(process.generation(), Ok(1));
        // The same number, another process: as when a number is given out again.
        let other = Process::find(pid, at, [8; 16]);
        assert!(matches!(other, Err(Error::PeerLost(_))), "{other:?}");
        // The identity is no more.
        let gone = Process::find(pid, 4096, [7; 16]);
        assert!(matches!(gone, Err(Error::PeerLost(_))), "{gone:?}");
    }

    #[test]
    fn a_process_that_ended_is_lost() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let found = Process::find(child.id(), 4096, [0; 16]);
        assert!(matches!(found, Err(Error::PeerLost(_))), "{found:?}");
    }
}
