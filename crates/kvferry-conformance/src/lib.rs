//! One suite for all back ends: what `Transport` promises, between two real processes.
//!
//! A back end from elsewhere takes part with a test that has no harness of its own:
//!
//! ```no_run
//! # use kvferry_conformance::{BackEnd, Suite};
//! # use kvferry_transport::{Error, memory::HostMemory, tcp::{Tcp, TcpOptions}};
//! struct MyEnd;
//!
//! impl BackEnd for MyEnd {
//!     type Transport = Tcp;
//!     type Memory = HostMemory;
//!     const NAME: &'static str = "mine";
//!     const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
//!     const NEEDS_THE_PEER: bool = true;
//!     const SEES_DEREGISTRATION: bool = true;
//!     const SETTLES_ALONE: bool = true;
//!
//!     fn new() -> Result<Tcp, Error> {
//!         Tcp::new(TcpOptions::default())
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     Suite::default().add::<MyEnd>().run()
//! }
//! ```
//!
//! Every test runs in a process of its own, and starts its peers as further processes: all of them
//! are this binary. So one test cannot disturb another, back ends that are set up by environment
//! variables each get theirs, and a test that hangs is ended and reported.
//!
//! NIXL is fetched from PyPI on first use, by the code that `kvferry nixl install` runs. Where it
//! cannot be had, its tests fail.
//!
//! `cuda` runs where there is a GPU, and `nixl` on GPU memory where `KVFERRY_NIXL` names NIXL, too. Where there is
//! none, the suite says so; `cuda-twin` and `nixl-twin` run everywhere: the same back ends on a driver that has no
//! card, whose memory is the host's.
//!
//! `KVFERRY_LONG_TESTS=1` makes the random tests ten times as long.

mod back_end;
mod census;
mod data;
mod memory;
mod pair;
mod peer;
mod promises;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use back_end::BackEnd;
use back_end::{
    CudaEnd, CudaTwinEnd, LocalEnd, MappedTwinEnd, NixlCardEnd, NixlEnd, NixlTcpEnd, NixlTwinEnd,
    TcpCardEnd, TcpEnd, TcpSealedEnd, TcpTwinEnd,
};
use kvferry_cuda::ON_THE_CPU;
use kvferry_cuda::driver::Card;
use libtest_mimic::{Arguments, Failed, Trial};
pub use memory::Memory;

/// The first argument of the processes that are not the runner.
pub(crate) const CHILD: &str = "--conformance-child";

/// Makes the random tests longer.
pub(crate) const LONG: &str = "KVFERRY_LONG_TESTS";

/// When a test is taken to hang. Many times what each takes by itself: machines may be busy with what others do
/// on them.
const PATIENCE: Duration = Duration::from_secs(600);

/// The back ends that take part.
#[derive(Default)]
pub struct Suite(Vec<End>);

/// One of them.
struct End {
    name: &'static str,
    promises: fn() -> Vec<promises::Promise>,
    own: Vec<promises::Promise>,
    /// Runs one test, by its name, in a process of its own.
    run: fn(&'static str) -> Result<(), Failed>,
    /// Is the other process of a test.
    serve: fn(&[String]),
}

impl Suite {
    /// kvferry's own.
    pub fn of_kvferry() -> Self {
        let suite = Self::default()
            .with::<LocalEnd>(promises::for_local())
            .with::<TcpEnd>(vec![])
            .with::<TcpSealedEnd>(vec![])
            .with::<NixlEnd>(vec![])
            .with::<NixlTcpEnd>(promises::for_nixl_tcp())
            .with::<CudaTwinEnd>(promises::for_cuda_twin())
            .with::<MappedTwinEnd>(vec![])
            .with::<NixlTwinEnd>(promises::for_nixl_twin())
            .with::<TcpTwinEnd>(promises::for_tcp_twin());
        match Card::open(0) {
            Ok(_) => {
                let suite = suite.with::<CudaEnd>(promises::for_cuda()).with::<TcpCardEnd>(vec![]);
                match std::env::var_os("KVFERRY_NIXL") {
                    Some(_) => suite.with::<NixlCardEnd>(vec![]),
                    None => suite,
                }
            }
            Err(error) => {
                // Said once, and not by each process of each test.
                if std::env::args().nth(1).is_none_or(|first| first != CHILD) {
                    eprintln!("NOT CHECKED: cuda on a GPU ({error}); its twin is checked");
                }
                suite
            }
        }
    }

    /// With one more.
    #[must_use]
    pub fn add<B: BackEnd>(self) -> Self {
        self.with::<B>(vec![])
    }

    /// With one that promises something of its own.
    fn with<B: BackEnd>(mut self, own: Vec<promises::Promise>) -> Self {
        let (run, serve) = (run_test::<B>, peer::serve::<B>);
        self.0.push(End { name: B::NAME, promises: promises::all::<B>, own, run, serve });
        self
    }

    /// Runs the tests that the command line asks for, or is one of their processes.
    pub fn run(self) -> ExitCode {
        let arguments: Vec<String> = std::env::args().collect();
        if let [_, child, role, name, rest @ ..] = &arguments[..]
            && child == CHILD
        {
            // SAFETY: a plain request to the kernel: end this process when the one that started it
            // ends, so that nothing stays behind when a test fails.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let end = self.0.into_iter().find(|end| end.name == name);
            end.unwrap_or_else(|| panic!("no back end is called {name}")).play(role, rest);
            return ExitCode::SUCCESS;
        }
        let trials = self.0.into_iter().flat_map(|end| {
            let End { name: of, run, .. } = end;
            let promises = (end.promises)().into_iter().chain(end.own);
            promises.map(move |(name, _)| Trial::test(format!("{of}::{name}"), move || run(name)))
        });
        libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
    }
}

impl End {
    /// What a process does that is not the runner.
    fn play(self, role: &str, arguments: &[String]) {
        match role {
            "peer" => (self.serve)(arguments),
            "reader" => promises::reader(arguments),
            "test" => {
                let mut all = (self.promises)().into_iter().chain(self.own);
                let (_, test) = all.find(|(name, _)| name == &arguments[0]).unwrap();
                test();
            }
            other => panic!("no role is called {other}"),
        }
    }
}

/// driver.c, compiled once.
fn twin() -> &'static Path {
    static TWIN: OnceLock<PathBuf> = OnceLock::new();
    TWIN.get_or_init(|| {
        if let Some(built) = std::env::var_os("KVFERRY_TWIN") {
            return built.into();
        }
        let library = beside_this_program("libtwin.so");
        build(
            &[("driver.c", include_str!("driver.c")), ON_THE_CPU[0], ON_THE_CPU[1]],
            &[],
            &library,
        );
        library
    })
}

/// A file beside the program that runs the tests: what is built for them is kept with it.
fn beside_this_program(name: &str) -> PathBuf {
    std::env::current_exe().expect("this program has a place").with_file_name(name)
}

/// Compiles C, of which the first file includes the others, to a library.
pub(crate) fn build(files: &[(&str, &str)], options: &[&str], library: &Path) {
    let made = library.with_extension(std::process::id().to_string());
    let folder = library.with_extension(format!("{}.c", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, text) in files {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o"])
        .args([&made, &folder.join(files[0].0)])
        .args(options)
        .status()
        .expect("a C compiler called cc");
    assert!(built.success(), "{} does not compile", files[0].0);
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::rename(&made, library).unwrap();
}

/// Runs one test in a process of its own.
fn run_test<B: BackEnd>(name: &str) -> Result<(), Failed> {
    if B::NAME.starts_with("nixl") && std::env::var_os("KVFERRY_NIXL").is_none() {
        kvferry_nixl::install(None)?;
    }
    let mut child = Command::new(std::env::current_exe()?)
        .args([CHILD, "test", B::NAME, name])
        .envs(B::ENVIRONMENT.iter().copied())
        .envs(B::NAME.ends_with("-twin").then(|| ("KVFERRY_CUDA_DRIVER", twin())))
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
            return Err(format!("the test has not ended after {} s", patience.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
