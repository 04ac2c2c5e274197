//! The demo's processes: started, spoken to, signalled, and none left behind.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command as Process, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::words::{Command, PROCESS, Reply, Setup};

/// Names one process of a demo; never given twice.
pub(crate) type MemberId = usize;

/// All processes.
pub(crate) struct Crew {
    /// What starts one of them, without its argument.
    program: Vec<OsString>,
    members: Vec<Member>,
    said: Sender<(MemberId, Option<Reply>)>,
    heard: Receiver<(MemberId, Option<Reply>)>,
}

struct Member {
    process: Child,
    /// To its standard input, by a thread: a stopped process stops nobody else.
    lines: Option<Sender<String>>,
    gone: bool,
}

impl Crew {
    pub(crate) fn new(program: Vec<OsString>) -> Self {
        let (said, heard) = mpsc::channel();
        Self { program, members: vec![], said, heard }
    }

    pub(crate) fn start(&mut self, setup: &Setup) -> Result<MemberId, String> {
        let (program, words) =
            self.program.split_first().ok_or("it is not said what starts one")?;
        let mut process = Process::new(program)
            .args(words)
            .arg(PROCESS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if std::env::var_os("KVFERRY_DEMO_LOG").is_some() {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .spawn()
            .map_err(|error| format!("cannot start a process: {error}"))?;
        let id = self.members.len();
        let (Some(mut input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("a process has no standard input and output".to_owned());
        };
        let (lines, to_write) = mpsc::channel::<String>();
        thread::spawn(move || {
            for line in to_write {
                if writeln!(input, "{line}").and_then(|()| input.flush()).is_err() {
                    break;
                }
            }
        });
        let said = self.said.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let reply = line.ok().and_then(|line| serde_json::from_str(&line).ok());
                let Some(reply) = reply else { break };
                if said.send((id, Some(reply))).is_err() {
                    break;
                }
            }
            _ = said.send((id, None));
        });
        let setup = serde_json::to_string(setup).map_err(|error| error.to_string())?;
        _ = lines.send(setup);
        self.members.push(Member { process, lines: Some(lines), gone: false });
        Ok(id)
    }

    pub(crate) fn tell(&self, id: MemberId, command: &Command) {
        if let (Some(lines), Ok(line)) = (&self.members[id].lines, serde_json::to_string(command)) {
            _ = lines.send(line);
        }
    }

    /// The next thing that a process says; `None` from one that has ended.
    pub(crate) fn hear(&self, until: Instant) -> Option<(MemberId, Option<Reply>)> {
        self.heard.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    pub(crate) fn signal(&self, id: MemberId, signal: i32) {
        let member = &self.members[id];
        if !member.gone
            && let Ok(pid) = i32::try_from(member.process.id())
        {
            // SAFETY: a plain system call; the process is a child that was not waited for, so that its
            // number is still its own.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// Ends a process without a word.
    pub(crate) fn kill(&mut self, id: MemberId) {
        let member = &mut self.members[id];
        if !member.gone {
            _ = member.process.kill();
            _ = member.process.wait();
            member.gone = true;
        }
    }

    /// Lets all processes end; answers how many had to be made to.
    pub(crate) fn dismiss(&mut self, patience: Duration) -> usize {
        for id in 0..self.members.len() {
            self.signal(id, libc::SIGCONT);
            self.members[id].lines = None;
        }
        let until = Instant::now() + patience;
        let mut stubborn = 0;
        for member in self.members.iter_mut().filter(|member| !member.gone) {
            loop {
                match member.process.try_wait() {
                    Ok(Some(_)) => break,
                    _ if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                    _ => {
                        stubborn += 1;
                        _ = member.process.kill();
                        _ = member.process.wait();
                        break;
                    }
                }
            }
            member.gone = true;
        }
        stubborn
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for id in 0..self.members.len() {
            self.kill(id);
        }
    }
}
