//! One suite for all back ends: what `Transport` promises, between two real processes.
//!
//! Every test runs in a process of its own, and starts its peers as further processes: all of them
//! are this binary. So one test cannot disturb another, back ends that are set up by environment
//! variables each get theirs, and a test that hangs is ended and reported.
//!
//! NIXL is fetched from PyPI on first use, by the code that `kvferry nixl install` runs. Where it
//! cannot be had, its tests fail.
//!
//! `KVFERRY_LONG_TESTS=1` makes the random tests ten times as long.

mod back_end;
mod census;
mod data;
mod pair;
mod peer;
mod promises;

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use back_end::{BackEnd, LocalEnd, NixlEnd, NixlTcpEnd, TcpEnd};
use libtest_mimic::{Arguments, Failed, Trial};

/// The first argument of the processes that are not the runner.
pub(crate) const CHILD: &str = "--conformance-child";

/// Makes the random tests longer.
pub(crate) const LONG: &str = "KVFERRY_LONG_TESTS";

/// When a test is taken to hang.
const PATIENCE: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, child, role, name, rest @ ..] = &arguments[..]
        && child == CHILD
    {
        // SAFETY: a plain request to the kernel: end this process when the one that started it
        // ends, so that nothing stays behind when a test fails.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        match name.as_str() {
            LocalEnd::NAME => run_child::<LocalEnd>(role, rest),
            TcpEnd::NAME => run_child::<TcpEnd>(role, rest),
            NixlEnd::NAME => run_child::<NixlEnd>(role, rest),
            NixlTcpEnd::NAME => run_child::<NixlTcpEnd>(role, rest),
            other => panic!("no back end is called {other}"),
        }
        return ExitCode::SUCCESS;
    }
    let mut trials = Vec::new();
    add::<LocalEnd>(&mut trials, promises::for_local());
    add::<TcpEnd>(&mut trials, Vec::new());
    add::<NixlEnd>(&mut trials, Vec::new());
    add::<NixlTcpEnd>(&mut trials, promises::for_nixl_tcp());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn add<B: BackEnd>(trials: &mut Vec<Trial>, own: Vec<promises::Promise>) {
    for (name, _) in promises::all::<B>().into_iter().chain(own) {
        let trial = move || run_test::<B>(name);
        trials.push(Trial::test(format!("{}::{name}", B::NAME), trial));
    }
}

/// Runs one test in a process of its own.
fn run_test<B: BackEnd>(name: &str) -> Result<(), Failed> {
    if B::NAME.starts_with("nixl") {
        kvferry_transport::nixl::install(None)?;
    }
    let mut child = Command::new(std::env::current_exe()?)
        .args([CHILD, "test", B::NAME, name])
        .envs(B::ENVIRONMENT.iter().copied())
        .stdin(Stdio::null())
        .spawn()?;
    let patience = match std::env::var_os(LONG) {
        Some(_) => PATIENCE * 10,
        None => PATIENCE,
    };
    let until = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait()? {
            return if status.success() {
                Ok(())
            } else {
                Err(format!("the test's process ended with {status}").into())
            };
        }
        if Instant::now() >= until {
            child.kill()?;
            child.wait()?;
            return Err("the test hangs".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn run_child<B: BackEnd>(role: &str, arguments: &[String]) {
    match role {
        "peer" => peer::serve::<B>(arguments),
        "reader" => promises::reader(arguments),
        "test" => {
            let own = match B::NAME {
                LocalEnd::NAME => promises::for_local(),
                NixlTcpEnd::NAME => promises::for_nixl_tcp(),
                _ => Vec::new(),
            };
            let wanted = &arguments[0];
            let (_, test) = promises::all::<B>()
                .into_iter()
                .chain(own)
                .find(|(name, _)| name == wanted)
                .unwrap();
            test();
        }
        other => panic!("no role is called {other}"),
    }
}
