//! How the parts of a run ended: whatever becomes of one, the others are measured and kept.

use serde::Serialize;

use crate::Failure;

#[derive(Debug, Default, Serialize)]
pub(super) struct Outcome {
    /// What did not take part, and why.
    pub(super) absent: Vec<(String, String)>,
    /// What was measured, or tried, and is not right.
    pub(super) failures: Vec<String>,
}

impl Outcome {
    /// What a part gave. If that is an error, it is said and kept.
    pub(super) fn keep<T>(&mut self, part: &str, given: Result<T, Failure>) -> Option<T> {
        given.map_err(|error| self.fail(&format!("{part}: {error}"))).ok()
    }

    pub(super) fn fail(&mut self, what: &str) {
        let what = one_line(what);
        println!("{what}");
        self.failures.push(what);
    }

    /// A part that this machine has not all for.
    pub(super) fn miss(&mut self, part: &str, why: &str) {
        let why = one_line(why);
        println!("\n{part} did not take part: {why}");
        self.absent.push((part.to_owned(), why));
    }

    /// Says once more what did not take part; an error, in one line, where something failed.
    pub(super) fn end(&self) -> Result<(), Failure> {
        for (part, why) in &self.absent {
            eprintln!("{part} did not take part: {why}");
        }
        match self.failures.as_slice() {
            [] => Ok(()),
            failures => Err(format!("{} failed: {}", failures.len(), failures.join("; ")).into()),
        }
    }
}

/// Some errors have lines of their own for what was tried.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
