//! One suite for all back ends: what `Transport` promises, between two real processes.
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

use back_end::{
    BackEnd, CudaEnd, CudaTwinEnd, LocalEnd, MappedTwinEnd, NixlCardEnd, NixlEnd, NixlTcpEnd,
    NixlTwinEnd, TcpEnd,
};
use kvferry_transport::cuda::driver::Card;
use libtest_mimic::{Arguments, Failed, Trial};

/// The first argument of the processes that are not the runner.
pub(crate) const CHILD: &str = "--conformance-child";

/// Makes the random tests longer.
pub(crate) const LONG: &str = "KVFERRY_LONG_TESTS";

/// When a test is taken to hang. Many times what each takes by itself: machines may be busy with what others do
/// on them.
const PATIENCE: Duration = Duration::from_secs(600);

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
            NixlCardEnd::NAME => run_child::<NixlCardEnd>(role, rest),
            NixlTwinEnd::NAME => run_child::<NixlTwinEnd>(role, rest),
            CudaEnd::NAME => run_child::<CudaEnd>(role, rest),
            CudaTwinEnd::NAME => run_child::<CudaTwinEnd>(role, rest),
            MappedTwinEnd::NAME => run_child::<MappedTwinEnd>(role, rest),
            other => panic!("no back end is called {other}"),
        }
        return ExitCode::SUCCESS;
    }
    let mut trials = Vec::new();
    add::<LocalEnd>(&mut trials, promises::for_local());
    add::<TcpEnd>(&mut trials, Vec::new());
    add::<NixlEnd>(&mut trials, Vec::new());
    add::<NixlTcpEnd>(&mut trials, promises::for_nixl_tcp());
    add::<CudaTwinEnd>(&mut trials, promises::for_cuda_twin());
    add::<NixlTwinEnd>(&mut trials, promises::for_nixl_twin());
    match Card::open(0) {
        Ok(_) => {
            add::<CudaEnd>(&mut trials, promises::for_cuda());
            if std::env::var_os("KVFERRY_NIXL").is_some() {
                add::<NixlCardEnd>(&mut trials, Vec::new());
            }
        }
        Err(error) => eprintln!("NOT CHECKED: cuda on a GPU ({error}); its twin is checked"),
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// driver.c, compiled once.
fn twin() -> &'static Path {
    static TWIN: OnceLock<PathBuf> = OnceLock::new();
    TWIN.get_or_init(|| {
        if let Some(built) = std::env::var_os("KVFERRY_TWIN") {
            return built.into();
        }
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libtwin.so");
        build("driver.c", &[], &library);
        library
    })
}

/// Compiles a file of this folder to a library.
pub(crate) fn build(source: &str, options: &[&str], library: &Path) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance");
    let made = library.with_extension(std::process::id().to_string());
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o"])
        .args([&made, &folder.join(source)])
        .args(options)
        .status()
        .expect("a C compiler called cc");
    assert!(built.success(), "{source} does not compile");
    std::fs::rename(&made, library).unwrap();
}

fn add<B: BackEnd>(trials: &mut Vec<Trial>, own: Vec<promises::Promise>) {
    for (name, _) in promises::all::<B>().into_iter().chain(own) {
        let trial = move || run_test::<B>(name);
        trials.push(Trial::test(format!("{}::{name}", B::NAME), trial));
    }
}

/// Runs one test in a process of its own.
fn run_test<B: BackEnd>(name: &str) -> Result<(), Failed> {
    if B::NAME.starts_with("nixl") && std::env::var_os("KVFERRY_NIXL").is_none() {
        kvferry_transport::nixl::install(None)?;
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

fn run_child<B: BackEnd>(role: &str, arguments: &[String]) {
    match role {
        "peer" => peer::serve::<B>(arguments),
        "reader" => promises::reader(arguments),
        "test" => {
            let own = match B::NAME {
                LocalEnd::NAME => promises::for_local(),
                NixlTcpEnd::NAME => promises::for_nixl_tcp(),
                CudaEnd::NAME => promises::for_cuda(),
                CudaTwinEnd::NAME => promises::for_cuda_twin(),
                NixlTwinEnd::NAME => promises::for_nixl_twin(),
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
