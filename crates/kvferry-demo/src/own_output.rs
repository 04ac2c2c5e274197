//! A standard output of one's own, for processes that answer over it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Takes the standard output for the caller alone: what anybody else in the process prints goes to the
/// standard error from now on. (UCX prints its warnings, for one.)
pub fn take() -> io::Result<File> {
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    // SAFETY: both descriptors are open, and nobody owns the standard output.
    if unsafe { libc::dup2(2, 1) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(output.into())
}
