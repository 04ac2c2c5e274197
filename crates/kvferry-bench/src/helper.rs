//! A second process of this program, for benchmarks between two: it is asked, and answers, a line of JSON each.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvferry_demo::own_output;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Failure;

/// That process, from the one that asks. It ends with this.
pub(super) struct Helper {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts this program with these arguments, which make it [answer].
    pub(super) fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe from the source")?);
        Ok(Self { input: child.stdin.take(), output, child })
    }

    pub(super) fn ask<Q, A>(&mut self, question: &Q) -> Result<A, Failure>
    where
        Q: Serialize + ?Sized,
        A: DeserializeOwned,
    {
        let input = self.input.as_mut().ok_or("no pipe to the source")?;
        writeln!(input, "{}", serde_json::to_string(question)?)?;
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err("the process that is read has ended".into());
        }
        let answer: Result<A, String> = serde_json::from_str(&line)
            .map_err(|error| format!("the process that is read says {line:?}: {error}"))?;
        Ok(answer?)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers until nobody asks any more. An error is an answer, too.
pub(super) fn answer<Q, A>(mut answer: impl FnMut(Q) -> Result<A, Failure>) -> Result<(), Failure>
where
    Q: DeserializeOwned,
    A: Serialize,
{
    // SAFETY: a plain request to the kernel: end this process with the one that started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // UCX writes its warnings to the standard output, which is spoken for.
    let mut output = own_output::take()?;
    for line in std::io::stdin().lock().lines() {
        let made = answer(serde_json::from_str(&line?)?).map_err(|error| error.to_string());
        writeln!(output, "{}", serde_json::to_string(&made)?)?;
    }
    Ok(())
}
