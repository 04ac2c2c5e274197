//! `kvferry drain`: tell a running agent that it is about to go, and wait until it can.

use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use kvferry_agent::{Left, ask_drain};

use crate::failure::Failure;
use crate::output;
use crate::reach::Reach;
use crate::text;

/// Have an engine hand over nothing new, and wait until what it has promised is read.
///
/// From now on the engine grants no lease: prompts that still reach it are computed, and the decode server
/// computes them again. Open leases are served. Returns when none is left, nor anything that this engine
/// itself still reads from others. Requests that it is answering are the serving engine's own: stop that
/// gently afterwards. May be given as often as one likes.
///
/// Exit codes: 0 nothing is left, 3 something is when the time is up, 1 the engine does not answer.
///
/// An agent only answers those who hold its key: hand it in as a file, or in the environment
/// (KVFERRY_KEY). Without a key, only agents on this machine that have none either will answer.
#[derive(Debug, Args)]
pub(crate) struct Drain {
    #[command(flatten)]
    reach: Reach,
    /// How long to wait until nothing is left, in seconds. 0: do not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u64).range(0..=86400))]
    wait: u64,
    /// Take it back: the engine stays, and hands over again.
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
    /// Print what is left at the end as JSON, and nothing else.
    #[arg(long)]
    json: bool,
}

/// How often to ask what is left.
const PAUSE: Duration = Duration::from_millis(250);
const NOT_EMPTY: u8 = 3;

impl Drain {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let trust = self.reach.trust()?;
        let ask = |on| {
            ask_drain(&self.reach.address, &trust, self.reach.patience(), on)
                .map_err(|error| self.reach.silent(&error))
        };
        if self.undo {
            let left = ask(false)?;
            self.end(left, || "it hands over again".to_owned());
            return Ok(());
        }
        let began = Instant::now();
        let mut shown = None;
        loop {
            let left = ask(true)?;
            if left.is_empty() {
                self.end(left, || "drained: nothing is left".to_owned());
                return Ok(());
            }
            if began.elapsed() >= Duration::from_secs(self.wait) {
                self.end(left, || format!("not drained yet: {}", said(left)));
                return if self.wait == 0 { Ok(()) } else { Err(Failure::Said(NOT_EMPTY)) };
            }
            if shown != Some(left) && !self.json {
                output::print(&format!("drains: {}\n", said(left)));
                shown = Some(left);
            }
            sleep(PAUSE);
        }
    }

    fn end(&self, left: Left, says: impl Fn() -> String) {
        let line = match self.json {
            true => serde_json::json!({ "leases": left.leases, "holds": left.holds }).to_string(),
            false => says(),
        };
        output::print(&(line + "\n"));
    }
}

fn said(left: Left) -> String {
    let kept = text::many(left.leases.into(), "request");
    let held = text::many(left.holds.into(), "request");
    format!("{kept} kept for others, {held} kept by others for it")
}
