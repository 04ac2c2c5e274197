//! How a command ends.

use std::fmt::Display;
use std::process::ExitCode;

/// Why a command did not end well.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The input or the usage is wrong.
    Input(String),
    /// The pair does not fit.
    Refused(String),
}

impl Failure {
    /// Wrong input.
    pub(crate) fn input(problem: impl Display) -> Self {
        Self::Input(problem.to_string())
    }
}

/// Says on standard error what went wrong, in one line, and picks the exit code.
pub(crate) fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(problem)) => {
            eprintln!("error: {problem}");
            ExitCode::from(1)
        }
        Err(Failure::Refused(reason)) => {
            eprintln!("refused: {reason}");
            ExitCode::from(2)
        }
    }
}

/// Ends for a command line that could not be read, or that asked for help.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // Nothing is left to do when standard output or error is closed.
    let _ = error.print();
    ExitCode::from(u8::from(error.use_stderr()))
}
