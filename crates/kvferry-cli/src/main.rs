//! The `kvferry` command, as a program of its own.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let program = std::env::current_exe().map(PathBuf::into_os_string);
    ExitCode::from(kvferry_cli::run(std::env::args_os(), program.into_iter().collect()))
}
