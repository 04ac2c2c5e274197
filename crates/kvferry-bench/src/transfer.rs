//! `kvferry-bench transfer`: how fast bytes get from one process to another.

use std::fs;
use std::io::IsTerminal;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use kvferry_nixl as nixl;
use serde::Serialize;

use super::Failure;
use super::contender::{Case, Contender, Order, Running};

/// Measure the transports between two processes of this machine.
///
/// Every contender reads the same pieces in every round, one contender after the other, and each
/// time is set against memcpy of the same pieces in the same round. The numbers printed are
/// medians over the rounds. NIXL takes part when it is installed, Mooncake when the interpreter has it.
#[derive(Debug, Args)]
pub(super) struct Transfer {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// How often everything is measured.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// MiB to move in each transfer.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Sizes of the pieces, in KiB, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = [4, 64, 1024])]
    pieces: Vec<usize>,
    /// Who takes part, separated by commas. Without this option: everyone that is installed.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Contender>,
    /// The Python in which to look for Mooncake (mooncake-transfer-engine-non-cuda).
    #[arg(long, default_value = "python3", value_name = "PATH")]
    python: String,
}

#[derive(Debug, Serialize)]
struct Results {
    /// Bytes moved by each transfer.
    bytes: usize,
    rounds: usize,
    /// Contenders that could not take part, and why.
    absent: Vec<Absent>,
    cases: Vec<CaseResults>,
    /// CPU time of both processes of each pair while they had nothing to do.
    idle: Vec<Idle>,
}

#[derive(Debug, Serialize)]
struct Absent {
    contender: &'static str,
    why: String,
}

#[derive(Debug, Serialize)]
struct CaseResults {
    piece_bytes: usize,
    order: String,
    contenders: Vec<Median>,
}

#[derive(Debug, Serialize)]
struct Median {
    contender: &'static str,
    /// The time of memcpy over the contender's time, in the same round.
    ratio_to_memcpy: f64,
    gib_per_second: f64,
    /// How long the call that starts the transfer takes.
    post_microseconds: f64,
}

#[derive(Debug, Serialize)]
struct Idle {
    contender: &'static str,
    /// Of one core, for both processes together.
    cpu_fraction: f64,
}

impl Transfer {
    pub(super) fn run(self) -> Result<(), Failure> {
        let bytes = self.mib.checked_mul(1 << 20);
        let bytes = bytes.ok_or_else(|| format!("--mib {}: that is too much", self.mib))?;
        let pieces: Vec<usize> =
            self.pieces.iter().map(|kib| kib.saturating_mul(1 << 10)).collect();
        if self.rounds == 0 || bytes == 0 {
            let (rounds, mib) = (self.rounds, self.mib);
            return Err(format!(
                "nothing to measure: --rounds {rounds}, --mib {mib}; at least 1 each"
            )
            .into());
        }
        if let Some(piece) = pieces.iter().find(|&&p| p == 0 || !bytes.is_multiple_of(p)) {
            let (kib, mib) = (piece >> 10, self.mib);
            return Err(format!(
                "--pieces {kib}: pieces of {kib} KiB do not fill {mib} MiB evenly"
            )
            .into());
        }
        let progress = Progress::new();
        let mut absent = Vec::new();
        let mut running = Vec::new();
        for contender in Contender::ALL {
            // Memcpy always: the others are compared with it.
            let wanted = self.only.is_empty()
                || self.only.contains(&contender)
                || contender == Contender::Memcpy;
            if !wanted {
                continue;
            }
            progress.say(&format!("starting {contender}"));
            match self.start(contender, bytes) {
                Ok(started) => running.push((contender, started)),
                Err(why) => {
                    absent.push(Absent { contender: contender.name(), why: why.to_string() });
                }
            }
        }
        let mut cases = Vec::new();
        for order in [Order::Contiguous, Order::Scattered] {
            for &piece in &pieces {
                let case = Case { piece, order };
                let say = |round: usize| {
                    progress.say(&format!("{} KiB {order}, round {round}", piece >> 10));
                };
                cases.push(measure(&mut running, case, self.rounds, bytes, say)?);
            }
        }
        progress.say("idle");
        let idle = idle(&running)?;
        progress.done();
        let results = Results { bytes, rounds: self.rounds, absent, cases, idle };
        if self.json {
            println!("{}", serde_json::to_string_pretty(&results)?);
        } else {
            print(&results);
        }
        Ok(())
    }

    fn start(&self, contender: Contender, bytes: usize) -> Result<Running, Failure> {
        if contender.needs_nixl() {
            nixl::find(None)?;
        }
        if contender == Contender::MooncakeTcp {
            let output = Command::new(&self.python)
                .args(["-c", "import mooncake.engine"])
                .stdin(Stdio::null())
                .output()
                .map_err(|error| format!("{}: {error}", self.python))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                let last = said.trim_end().lines().next_back().unwrap_or_default();
                return Err(format!("{}: {last}", self.python).into());
            }
        }
        Running::start(contender, bytes, &self.python)
    }
}

/// Interleaved rounds of one case, after one that is checked and not counted.
fn measure(
    running: &mut [(Contender, Running)],
    case: Case,
    rounds: usize,
    bytes: usize,
    say: impl Fn(usize),
) -> Result<CaseResults, Failure> {
    say(0);
    for (contender, running) in running.iter_mut() {
        running.sample(*contender, case, true)?;
    }
    let mut ratios = vec![Vec::new(); running.len()];
    let mut rates = vec![Vec::new(); running.len()];
    let mut posts = vec![Vec::new(); running.len()];
    for round in 1..=rounds {
        say(round);
        let mut memcpy = Duration::ZERO;
        for (i, (contender, running)) in running.iter_mut().enumerate() {
            let sample = running.sample(*contender, case, false)?;
            if *contender == Contender::Memcpy {
                memcpy = sample.total;
            }
            let seconds = sample.total.as_secs_f64();
            ratios[i].push(memcpy.as_secs_f64() / seconds);
            rates[i].push(bytes as f64 / seconds / (1 << 30) as f64);
            posts[i].push(sample.post.as_secs_f64() * 1e6);
        }
    }
    let contenders = running
        .iter()
        .enumerate()
        .map(|(i, (contender, _))| Median {
            contender: contender.name(),
            ratio_to_memcpy: median(&mut ratios[i]),
            gib_per_second: median(&mut rates[i]),
            post_microseconds: median(&mut posts[i]),
        })
        .collect();
    Ok(CaseResults { piece_bytes: case.piece, order: case.order.to_string(), contenders })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// What the pairs cost while nothing is asked of them.
fn idle(running: &[(Contender, Running)]) -> Result<Vec<Idle>, Failure> {
    const SECONDS: u64 = 3;
    let cpu = || -> Result<Vec<f64>, Failure> {
        running
            .iter()
            .map(|(_, running)| running.pids.iter().map(|&pid| cpu_seconds(pid)).sum())
            .collect()
    };
    let before = cpu()?;
    std::thread::sleep(Duration::from_secs(SECONDS));
    let after = cpu()?;
    let spent = std::iter::zip(before, after).map(|(before, after)| after - before);
    Ok(std::iter::zip(running, spent)
        .filter(|((contender, _), _)| *contender != Contender::Memcpy)
        .map(|((contender, _), spent)| Idle {
            contender: contender.name(),
            cpu_fraction: spent / SECONDS as f64,
        })
        .collect())
}

/// CPU time of a process so far, to the nanosecond: the usual counters tick only 100 times a
/// second.
fn cpu_seconds(pid: u32) -> Result<f64, Failure> {
    if pid == 0 {
        return Ok(0.0);
    }
    let mut nanos = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        let first = text.split_whitespace().next().ok_or("an empty schedstat")?;
        nanos += first.parse::<f64>()?;
    }
    Ok(nanos / 1e9)
}

fn print(results: &Results) {
    println!(
        "{} MiB per transfer, medians of {} rounds; memcpy = 1",
        results.bytes >> 20,
        results.rounds
    );
    for case in &results.cases {
        println!("\n{} KiB pieces, {}", case.piece_bytes >> 10, case.order);
        for median in &case.contenders {
            println!(
                "  {:<17} {:>6.3} of memcpy  {:>7.2} GiB/s  {:>10.1} µs to post",
                median.contender,
                median.ratio_to_memcpy,
                median.gib_per_second,
                median.post_microseconds,
            );
        }
    }
    println!("\nidle, both processes together");
    for idle in &results.idle {
        println!("  {:<17} {:>6.2} % of a core", idle.contender, idle.cpu_fraction * 100.0);
    }
    for absent in &results.absent {
        println!("\n{} did not take part: {}", absent.contender, absent.why);
    }
}

/// Says on the standard error where things stand, when somebody watches.
struct Progress {
    terminal: bool,
}

impl Progress {
    fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal() }
    }

    fn say(&self, text: &str) {
        if self.terminal {
            eprint!("\r\x1b[K{text}");
        }
    }

    fn done(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
