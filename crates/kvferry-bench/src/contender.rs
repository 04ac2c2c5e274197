//! What is measured: each contender is a pair of processes, one that reads and one that is read.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kvferry_demo::own_output;
use kvferry_nixl::{Nixl, NixlOptions};
use kvferry_testkit::one_by_one;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::tcp::{Encrypt, Tcp, TcpOptions};
use kvferry_transport::{ByteCopy, Operation, Place, Status, Transport};

use super::bare::{Bare, Lists};
use super::{Failure, memory};

/// Who takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Contender {
    /// `memcpy` of the same pieces, in one process: what the others are compared with.
    Memcpy,
    /// kvferry's `local`.
    Local,
    /// kvferry's `nixl`.
    Nixl,
    /// A bare loop over NIXL's C interface, with UCX's own choice of transport, and with the
    /// settings that kvferry uses.
    NixlBare,
    /// The same with NIXL's default settings.
    NixlBareDefault,
    /// kvferry's `tcp`.
    Tcp,
    /// The same, encrypted.
    TcpEncrypted,
    /// A bare loop over NIXL's C interface, with UCX's tcp.
    NixlBareTcp,
    /// Mooncake's transfer engine over tcp.
    MooncakeTcp,
}

impl Contender {
    pub(super) const ALL: [Self; 9] = [
        Self::Memcpy,
        Self::Local,
        Self::Nixl,
        Self::NixlBare,
        Self::NixlBareDefault,
        Self::Tcp,
        Self::TcpEncrypted,
        Self::NixlBareTcp,
        Self::MooncakeTcp,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Local => "local",
            Self::Nixl => "nixl",
            Self::NixlBare => "nixl-bare",
            Self::NixlBareDefault => "nixl-bare-default",
            Self::Tcp => "tcp",
            Self::TcpEncrypted => "tcp-encrypted",
            Self::NixlBareTcp => "nixl-bare-tcp",
            Self::MooncakeTcp => "mooncake-tcp",
        }
    }

    /// Whether NIXL's library is needed.
    pub(super) fn needs_nixl(self) -> bool {
        self == Self::Nixl || self.is_bare()
    }

    fn is_bare(self) -> bool {
        matches!(self, Self::NixlBare | Self::NixlBareDefault | Self::NixlBareTcp)
    }

    fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Nixl | Self::NixlBare | Self::NixlBareDefault => {
                &[("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n")]
            }
            Self::NixlBareTcp => {
                &[("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n"), ("UCX_TLS", "tcp")]
            }
            Self::MooncakeTcp => &[("GLOG_minloglevel", "3"), ("MC_LOG_LEVEL", "ERROR")],
            _ => &[],
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the pieces of a transfer lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// One after the other on both sides.
    Contiguous,
    /// In a random order at the source, like the blocks of a pool in use.
    Scattered,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Contiguous => "contiguous",
            Self::Scattered => "scattered",
        })
    }
}

impl FromStr for Order {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        match text {
            "contiguous" => Ok(Self::Contiguous),
            "scattered" => Ok(Self::Scattered),
            other => Err(format!("no order is called {other}").into()),
        }
    }
}

/// One case: `bytes` bytes in pieces of `piece` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) piece: usize,
    pub(super) order: Order,
}

impl Case {
    /// From where each piece comes: the place of the i-th is i pieces in.
    fn sources(self, bytes: usize) -> Vec<usize> {
        let count = bytes / self.piece;
        let mut sources: Vec<usize> = (0..count).collect();
        if self.order == Order::Scattered {
            let mut state = 0x2545_f491_4f6c_dd1d_u64;
            for i in (1..count).rev() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                sources.swap(i, (state % (i as u64 + 1)) as usize);
            }
        }
        sources.iter().map(|source| source * self.piece).collect()
    }
}

/// How long one transfer took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) total: Duration,
    /// The part of it that the caller could not use for anything else.
    pub(super) post: Duration,
}

/// A contender under way, seen from the bench.
pub(super) struct Running {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// All its processes.
    pub(super) pids: Vec<u32>,
}

impl Running {
    pub(super) fn start(contender: Contender, bytes: usize, python: &str) -> Result<Self, Failure> {
        let mut command = match contender {
            Contender::MooncakeTcp => {
                let mut command = Command::new(python);
                command.args(["-c", include_str!("mooncake.py"), "read"]).arg(bytes.to_string());
                command
            }
            _ => worker(contender, "read", bytes)?,
        };
        let mut child = command
            .envs(contender.environment().iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no pipe to a worker")?;
        let output = child.stdout.take().ok_or("no pipe from a worker")?;
        let mut running =
            Self { pids: vec![child.id()], child, input, output: BufReader::new(output) };
        let ready = running.line(contender)?;
        let peer = ready.strip_prefix("ready ").ok_or("a worker is not ready")?;
        running.pids.extend(peer.parse::<u32>().ok());
        Ok(running)
    }

    fn line(&mut self, contender: Contender) -> Result<String, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            return Err(format!("{contender} ended early").into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// Carries a case out once.
    pub(super) fn sample(
        &mut self,
        contender: Contender,
        case: Case,
        check: bool,
    ) -> Result<Sample, Failure> {
        let check = u8::from(check);
        writeln!(self.input, "{} {} {check}", case.piece, case.order)?;
        let line = self.line(contender)?;
        let mut numbers = line.split(' ').map(str::parse::<u64>);
        let mut next = || -> Result<Duration, Failure> {
            let nanos = numbers.next().ok_or("a worker said too little")??;
            Ok(Duration::from_nanos(nanos))
        };
        Ok(Sample { total: next()?, post: next()? })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn worker(contender: Contender, role: &str, bytes: usize) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["worker", contender.name(), role]).arg(bytes.to_string());
    Ok(command)
}

/// A process of a pair: reads, or is read.
#[derive(Debug, Args)]
pub(super) struct Worker {
    contender: Contender,
    #[arg(value_parser = ["read", "serve"])]
    role: String,
    bytes: usize,
}

const SEED: u64 = 0x0123_4567_89ab_cdef;

impl Worker {
    pub(super) fn run(self) -> Result<(), Failure> {
        // SAFETY: a plain request to the kernel: end this process with the one that started it.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let talk = Talk { output: own_output::take()? };
        match (self.contender, self.role.as_str()) {
            (Contender::Memcpy, _) => self.memcpy(talk),
            (Contender::Local, "read") => self.read(talk, &Local::new(LocalOptions::default())?),
            (Contender::Local, _) => self.serve(talk, &Local::new(LocalOptions::default())?),
            (Contender::Tcp, "read") => self.read(talk, &Tcp::new(TcpOptions::default())?),
            (Contender::Tcp, _) => self.serve(talk, &Tcp::new(TcpOptions::default())?),
            (Contender::TcpEncrypted, role) => {
                let transport =
                    Tcp::new(TcpOptions { encrypt: Encrypt::Always, ..TcpOptions::default() })?;
                match role {
                    "read" => self.read(talk, &transport),
                    _ => self.serve(talk, &transport),
                }
            }
            (Contender::Nixl, "read") => self.read(talk, &Nixl::new(&NixlOptions::default())?),
            (contender, "read") if contender.is_bare() => self.bare(talk),
            (contender, _) if contender.needs_nixl() => {
                self.serve(talk, &Nixl::new(&NixlOptions::default())?)
            }
            _ => Err("Mooncake has a worker of its own".into()),
        }
    }

    /// Lets its memory be read until its input ends.
    fn serve<T: Transport>(&self, mut talk: Talk, transport: &T) -> Result<(), Failure> {
        let memory = memory::zeros(self.bytes)?;
        memory::fill(&memory, SEED);
        // SAFETY: the memory is only touched through its address. It is unmapped before the
        // transport goes, but nothing is read any more then: the one who reads is gone.
        let region = unsafe { transport.register(memory.region()) }?;
        let description = transport.describe()?;
        let hex: String = description.iter().map(|b| format!("{b:02x}")).collect();
        talk.say(&format!("{} {} {hex}", std::process::id(), memory.base()))?;
        let mut line = String::new();
        while io::stdin().read_line(&mut line)? > 0 {}
        transport.deregister(region, Instant::now())?;
        Ok(())
    }

    fn source(&self) -> Result<SourceProcess, Failure> {
        let mut child = worker(self.contender, "serve", self.bytes)?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no pipe from the process that is read")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let mut words = line.trim_end().split(' ');
        let mut next = || words.next().ok_or("the process that is read said too little");
        let pid = next()?.parse()?;
        let base = next()?.parse()?;
        let hex = next()?;
        let description = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16))
            .collect::<Result<_, _>>()?;
        Ok(SourceProcess { child, pid, base, description })
    }

    fn memcpy(&self, talk: Talk) -> Result<(), Failure> {
        let source = memory::zeros(self.bytes)?;
        memory::fill(&source, SEED);
        let destination = memory::zeros(self.bytes)?;
        self.answer(talk, 0, &destination, |case| {
            let sources = case.sources(self.bytes);
            let began = Instant::now();
            for (i, &from) in sources.iter().enumerate() {
                memory::copy((&source, from), (&destination, i * case.piece), case.piece);
            }
            let total = began.elapsed();
            Ok(Sample { total, post: total })
        })
    }

    /// Reads through one of kvferry's transports.
    fn read<T: Transport>(&self, talk: Talk, transport: &T) -> Result<(), Failure> {
        let process = self.source()?;
        let memory = memory::zeros(self.bytes)?;
        // SAFETY: the memory is only touched through its address, and taken back below.
        let region = unsafe { transport.register(memory.region()) }?;
        let soon = || Instant::now() + Duration::from_secs(60);
        let peer = transport.connect(&process.description, soon())?;
        let done = self.answer(talk, process.pid, &memory, |case| {
            let copies: Vec<ByteCopy> = case
                .sources(self.bytes)
                .into_iter()
                .enumerate()
                .map(|(i, from)| ByteCopy {
                    source: process.base + from as u64,
                    destination: memory.base() + (i * case.piece) as u64,
                    bytes: case.piece as u64,
                })
                .collect();
            let loops = one_by_one(&copies);
            let began = Instant::now();
            let operation = transport.read(&peer, &loops, soon())?;
            let post = began.elapsed();
            match operation.wait(soon()) {
                Status::Done(_) => {}
                other => return Err(format!("a read ended as {other:?}").into()),
            }
            Ok(Sample { total: began.elapsed(), post })
        });
        transport.deregister(region, soon())?;
        done
    }

    /// Reads by NIXL alone.
    fn bare(&self, talk: Talk) -> Result<(), Failure> {
        let process = self.source()?;
        let mut settings = NixlOptions::default().settings();
        if self.contender != Contender::NixlBare {
            // No threads besides the one that posts: on one host the slower choice in most cases,
            // over tcp the faster.
            settings
                .parameters
                .retain(|(key, _)| !key.contains("threads") && !key.contains("batch"));
        }
        let memory = memory::zeros(self.bytes)?;
        let span = (memory.base(), self.bytes as u64, Place::Host);
        // SAFETY: the memory outlives it, and is only touched through its address.
        let bare = unsafe { Bare::new(&settings, vec![span], &process.description)? };
        let mut lists: Vec<(usize, Lists)> = Vec::new();
        self.answer(talk, process.pid, &memory, |case| {
            let sources = case.sources(self.bytes);
            if !lists.iter().any(|(piece, _)| *piece == case.piece) {
                let cell = |at: usize| ByteCopy {
                    source: process.base + (at * case.piece) as u64,
                    destination: memory.base() + (at * case.piece) as u64,
                    bytes: case.piece as u64,
                };
                let cells: Vec<ByteCopy> = (0..sources.len()).map(cell).collect();
                // SAFETY: the cells fill the memory that is registered here and by the peer.
                lists.push((case.piece, unsafe { bare.prepare(&cells, Place::Host)? }));
            }
            let (_, prepared) =
                lists.iter().find(|(piece, _)| *piece == case.piece).ok_or("a list is missing")?;
            let ours: Vec<i32> = (0..sources.len() as i32).collect();
            let theirs: Vec<i32> =
                sources.iter().map(|source| (source / case.piece) as i32).collect();
            let (total, post) = bare.read(prepared, &ours, &theirs)?;
            Ok(Sample { total, post })
        })
    }

    /// Carries out what the bench asks for until its input ends.
    fn answer(
        &self,
        mut talk: Talk,
        peer: u32,
        memory: &HostMemory,
        mut carry_out: impl FnMut(Case) -> Result<Sample, Failure>,
    ) -> Result<(), Failure> {
        talk.say(&format!("ready {peer}"))?;
        let mut line = String::new();
        while io::stdin().read_line(&mut line)? > 0 {
            let mut words = line.trim_end().split(' ');
            let mut next = || words.next().ok_or("the bench said too little");
            let case = Case { piece: next()?.parse()?, order: next()?.parse()? };
            let check = next()? == "1";
            if check {
                memory::fill(memory, 0);
            }
            let sample = carry_out(case)?;
            if check {
                for (i, from) in case.sources(self.bytes).into_iter().enumerate() {
                    for at in [0, case.piece / 16, case.piece / 8 - 1] {
                        let word = memory::word(SEED, from / 8 + at);
                        if !memory::holds(memory, i * case.piece / 8 + at, word) {
                            return Err("a read is not exact".into());
                        }
                    }
                }
            }
            talk.say(&format!("{} {}", sample.total.as_nanos(), sample.post.as_nanos()))?;
            line.clear();
        }
        Ok(())
    }
}

struct SourceProcess {
    child: Child,
    pid: u32,
    base: u64,
    description: Vec<u8>,
}

impl Drop for SourceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The pipe to whoever started this process.
struct Talk {
    output: std::fs::File,
}

impl Talk {
    fn say(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.output, "{line}")
    }
}
