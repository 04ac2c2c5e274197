//! The other process: serves memory and does what it is told over its standard input.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_transport::{RegionId, Transport};

use crate::back_end::BackEnd;
use crate::census;
use crate::data::{hash, pattern};
use crate::memory::Memory;

/// A peer process, seen from the test.
pub(crate) struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Address of its memory.
    pub(crate) base: u64,
    pub(crate) description: Vec<u8>,
}

impl Peer {
    /// Starts a process that serves `bytes` bytes filled with the pattern of `seed`.
    pub(crate) fn start<B: BackEnd>(bytes: usize, seed: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([crate::CHILD, "peer", B::NAME])
            .args([bytes.to_string(), seed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut peer = Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
            base: 0,
            description: Vec::new(),
        };
        let ready = peer.line();
        let mut words = ready.split(' ');
        assert_eq!(words.next(), Some("ready"), "the peer said: {ready}");
        peer.base = words.next().unwrap().parse().unwrap();
        peer.description = from_hex(words.next().unwrap());
        peer
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Has it do something, and returns what it answers.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.line()
    }

    pub(crate) fn hash(&mut self) -> u64 {
        self.ask("hash").parse().unwrap()
    }

    /// Has it give its memory up for other memory, filled with the pattern of `seed`.
    pub(crate) fn exchange(&mut self, seed: u64) {
        let answer = self.ask(&format!("exchange {seed}"));
        let (base, description) = answer.split_once(' ').unwrap();
        self.base = base.parse().unwrap();
        self.description = from_hex(description);
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: sends a signal to our own child, which has not been waited for.
        let sent = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }

    /// Stops the process, and returns when it has stopped.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        wait_until("the peer has stopped", || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            let state = stat.rsplit(')').next().unwrap().trim_start();
            state.starts_with('T')
        });
    }

    pub(crate) fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Kills it. It stays a zombie until the drop, as a careless supervisor leaves it.
    pub(crate) fn kill(&self) {
        self.signal(libc::SIGKILL);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for something that must come true; far longer than it takes.
pub(crate) fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The life of the peer process.
pub(crate) fn serve<B: BackEnd>(arguments: &[String]) {
    let [bytes, seed] = arguments else {
        panic!("a peer needs the size of its memory and a seed");
    };
    // UCX writes its warnings to the standard output: what goes there from now on goes to the
    // standard error.
    let mut output = {
        let output = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
        // SAFETY: both descriptors are open, and nobody owns the standard output.
        assert_eq!(unsafe { libc::dup2(2, 1) }, 1);
        File::from(output)
    };
    let mut say = |line: &str| writeln!(output, "{line}").unwrap();
    let mut memory = Some(filled::<B::Memory>(bytes.parse().unwrap(), seed));
    let transport = B::new().unwrap();
    let first = memory.as_ref().unwrap().region();
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    let mut region = Some(unsafe { transport.register(first) }.unwrap());
    say(&format!("ready {} {}", first.base, to_hex(&transport.describe().unwrap())));
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let answer = obey(&transport, &mut memory, &mut region, line.trim_end());
        say(&answer);
        line.clear();
    }
}

fn filled<M: Memory>(bytes: usize, seed: &str) -> M {
    let memory = M::new(bytes);
    memory.write(0, &pattern(seed.parse().unwrap(), bytes));
    memory
}

fn obey<T: Transport, M: Memory>(
    transport: &T,
    held: &mut Option<M>,
    region: &mut Option<RegionId>,
    command: &str,
) -> String {
    let memory = held.as_ref().unwrap();
    let words: Vec<&str> = command.split(' ').collect();
    let soon = Instant::now() + Duration::from_secs(20);
    match words[..] {
        ["hash"] => hash(&memory.snapshot()).to_string(),
        ["staging"] => {
            let staging = transport.staging();
            format!("{} {}", staging.packed, staging.in_use)
        }
        ["census"] => census::take().to_string(),
        ["deregister"] => {
            let result = transport.deregister(region.take().unwrap(), soon);
            format!("{result:?}")
        }
        ["register"] => {
            // SAFETY: as in `serve`.
            *region = Some(unsafe { transport.register(memory.region()) }.unwrap());
            "ok".to_owned()
        }
        // Other memory, at the same address if that is given out again.
        ["exchange", seed] => {
            let bytes = memory.bytes();
            transport.deregister(region.take().unwrap(), soon).unwrap();
            *held = None;
            let memory = held.insert(filled(bytes, seed));
            // SAFETY: as in `serve`.
            *region = Some(unsafe { transport.register(memory.region()) }.unwrap());
            format!("{} {}", memory.base(), to_hex(&transport.describe().unwrap()))
        }
        _ => panic!("a peer does not know how to {command}"),
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        write!(out, "{byte:02x}").unwrap();
        out
    })
}

pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}
