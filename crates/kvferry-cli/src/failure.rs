//! How a command ends.

use std::fmt::Display;

/// Why a command did not end well.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The input or the usage is wrong.
    Input(String),
    /// The pair does not fit.
    Refused(String),
    /// It has been said why; the command ends with this code.
    Said(u8),
}

impl Failure {
    /// Wrong input.
    pub(crate) fn input(problem: impl Display) -> Self {
        Self::Input(problem.to_string())
    }
}

/// Says on standard error what went wrong, in one line, and picks the exit code.
pub(crate) fn exit(result: Result<(), Failure>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(Failure::Input(problem)) => {
            eprintln!("error: {problem}");
            1
        }
        Err(Failure::Refused(reason)) => {
            eprintln!("refused: {reason}");
            2
        }
        Err(Failure::Said(code)) => code,
    }
}

/// Ends for a command line that could not be read, or that asked for help.
pub(crate) fn usage(error: &clap::Error) -> u8 {
    // Nothing is left to do when standard output or error is closed.
    let _ = error.print();
    u8::from(error.use_stderr())
}
