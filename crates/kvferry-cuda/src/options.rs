//! How the back end is set up.

use std::path::PathBuf;

/// How a [`Cuda`](super::Cuda) transport is set up.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// The card whose memory is registered, and whose kernels read.
    pub gpu: u32,
    /// How many multiprocessors a transfer may occupy; `None` for five sixths of them, and all where
    /// several transfers overlap: the next begins when little is left to hand out of one. On an H200
    /// that moves as much as all of them. With few, a model that runs meanwhile loses more for each byte
    /// that is loaded: loads take longer, and it waits for the multiprocessors that it does not get.
    pub sms: Option<u32>,
    /// The kernel, compiled beforehand (PTX or machine code); `None` to compile it with NVRTC. It runs on the card with
    /// all that this process may: name no file that others may write, nor take it from anybody else.
    pub kernel: Option<PathBuf>,
    /// Folders of Python packages of the process that this runs in (its `site-packages`), to look for
    /// NVRTC in first.
    pub site_packages: Vec<PathBuf>,
}
