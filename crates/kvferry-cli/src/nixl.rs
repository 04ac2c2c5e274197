//! `kvferry nixl`: get NVIDIA's transfer library.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvferry_nixl as nixl;

use crate::failure::Failure;
use crate::output;

/// Get NIXL, the transfer library for RDMA, NVLink and GPU memory.
#[derive(Debug, Args)]
pub(crate) struct Nixl {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetch NIXL's wheel with pip, check its hash, and unpack it into the user's cache.
    Install {
        /// The Python whose pip fetches it; without this option, the one that 'python3' names.
        #[arg(long, value_name = "PATH")]
        python: Option<PathBuf>,
    },
    /// Print where NIXL's library is.
    Where,
}

impl Nixl {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let library = match self.command {
            Command::Install { python } => nixl::install(python.as_deref()),
            Command::Where => nixl::find(None),
        };
        let library = library.map_err(Failure::input)?;
        output::print(&format!("{}\n", library.display()));
        Ok(())
    }
}
