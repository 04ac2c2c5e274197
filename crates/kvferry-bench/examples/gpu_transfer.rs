//! Moves GPU memory of one process into GPU memory of another through the `nixl` back end, checks
//! every byte, and prints the rate as found.
//!
//! Needs a GPU and NIXL, and no CUDA toolkit: CUDA's driver library is loaded at run time.
//! `tools/check-gpu-transfer.sh` runs it.
//!
//! Usage: `gpu_transfer [MIB [GPU [PEER'S GPU]]]`

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_nixl::{Nixl, NixlOptions};
use kvferry_testkit::one_by_one;
use kvferry_transport::{ByteCopy, Operation, Place, Region, Status, Transport};

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).without_time().with_target(false).init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: usize| -> Result<usize, Failure> {
        Ok(match arguments.get(at) {
            Some(text) => text.parse()?,
            None => otherwise,
        })
    };
    if arguments.first().is_some_and(|first| first == "serve") {
        return serve(number(1, 0)?, number(2, 0)? as u32);
    }
    let gpu = number(1, 0)?;
    check(number(0, 256)? << 20, gpu as u32, number(2, gpu)? as u32)
}

const SEED: u64 = 7;

/// The process that is read.
fn serve(bytes: usize, gpu: u32) -> Result<(), Failure> {
    // UCX writes its warnings to the standard output, which is spoken for.
    let mut output = std::fs::File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    // SAFETY: both descriptors are open, and nobody owns the standard output.
    assert_eq!(unsafe { libc::dup2(2, 1) }, 1);
    let cuda = Cuda::new(gpu)?;
    let memory = cuda.allocate(bytes)?;
    cuda.upload(memory, &pattern(SEED, bytes))?;
    let transport = Nixl::new(&NixlOptions::default())?;
    // SAFETY: the memory stays allocated until the process ends.
    unsafe { transport.register(region(memory, bytes, gpu)) }?;
    let description = transport.describe()?;
    let hex: String = description.iter().map(|b| format!("{b:02x}")).collect();
    writeln!(output, "{memory} {hex}")?;
    // Until the other process goes.
    std::io::stdin().lock().lines().for_each(drop);
    Ok(())
}

fn check(bytes: usize, gpu: u32, peer_gpu: u32) -> Result<(), Failure> {
    let process = Peer::start(bytes, peer_gpu)?;
    let cuda = Cuda::new(gpu)?;
    let memory = cuda.allocate(bytes)?;
    let transport = Nixl::new(&NixlOptions::default())?;
    // SAFETY: the memory stays allocated until the process ends.
    unsafe { transport.register(region(memory, bytes, gpu)) }?;
    let peer = transport.connect(&process.description, soon())?;
    println!("{} MiB from GPU {peer_gpu} of one process to GPU {gpu} of another", bytes >> 20);
    let pieces: [(&str, usize); 3] =
        [("one piece", bytes), ("1 MiB", 1 << 20), ("64 KiB", 1 << 16)];
    for (name, piece) in pieces {
        let copies: Vec<ByteCopy> = order(bytes / piece)
            .into_iter()
            .map(|i| (i * piece) as u64)
            .map(|at| ByteCopy {
                source: process.base + at,
                destination: memory + at,
                bytes: piece as u64,
            })
            .collect();
        let loops = one_by_one(&copies);
        let mut best = f64::INFINITY;
        for round in 0..4 {
            if round == 0 {
                cuda.upload(memory, &vec![0; bytes])?;
            }
            let began = Instant::now();
            finish(&transport.read(&peer, &loops, soon())?)?;
            best = best.min(began.elapsed().as_secs_f64());
            if round == 0 && cuda.download(memory, bytes)? != pattern(SEED, bytes) {
                return Err(format!("the read in pieces of {name} is not exact").into());
            }
        }
        println!("  read, {name}: exact, {:.2} GB/s at best", bytes as f64 / best / 1e9);
    }
    Ok(())
}

/// All numbers below, neighbours apart, so that copies are not merged.
fn order(count: usize) -> Vec<usize> {
    let evens = (0..count).step_by(2);
    evens.chain((1..count).step_by(2)).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

fn finish(operation: &impl Operation) -> Result<(), Failure> {
    match operation.wait(soon()) {
        Status::Done(_) => Ok(()),
        other => Err(format!("a transfer ended as {other:?}").into()),
    }
}

fn region(base: u64, bytes: usize, gpu: u32) -> Region {
    Region { base, bytes: bytes as u64, place: Place::Gpu(gpu) }
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64 / 8)
        .flat_map(|at| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

struct Peer {
    child: Child,
    base: u64,
    description: Vec<u8>,
}

impl Peer {
    fn start(bytes: usize, gpu: u32) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", &bytes.to_string(), &gpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("no pipe from the peer")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let (base, hex) = line.trim_end().split_once(' ').ok_or("the peer does not start")?;
        let description = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16))
            .collect::<Result<_, _>>()?;
        Ok(Self { base: base.parse()?, child, description })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As much of CUDA's driver interface as this needs.
struct Cuda {
    library: libloading::Library,
}

impl Cuda {
    /// Makes the primary context of a GPU this thread's current one.
    fn new(ordinal: u32) -> Result<Self, Failure> {
        // SAFETY: loading CUDA's driver library runs its initialisers, as any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }
            .map_err(|error| format!("there is no CUDA driver here: {error}"))?;
        let cuda = Self { library };
        let mut device: c_int = 0;
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: the declarations are those of the CUDA driver interface; all pointers are to live
        // values.
        unsafe {
            let init: Symbol<unsafe extern "C" fn(u32) -> c_int> = cuda.get(b"cuInit\0")?;
            said("cuInit", init(0))?;
            let get: Symbol<unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
                cuda.get(b"cuDeviceGet\0")?;
            said("cuDeviceGet", get(&raw mut device, ordinal as c_int))?;
            let retain: Symbol<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int> =
                cuda.get(b"cuDevicePrimaryCtxRetain\0")?;
            said("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
            let set: Symbol<unsafe extern "C" fn(*mut c_void) -> c_int> =
                cuda.get(b"cuCtxSetCurrent\0")?;
            said("cuCtxSetCurrent", set(context))?;
        }
        Ok(cuda)
    }

    /// # Safety
    ///
    /// The type must be that of the function.
    unsafe fn get<T>(&self, name: &[u8]) -> Result<Symbol<'_, T>, Failure> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.library.get(name) }?)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Failure> {
        let mut address = 0;
        // SAFETY: as in `new`.
        unsafe {
            let allocate: Symbol<unsafe extern "C" fn(*mut u64, usize) -> c_int> =
                self.get(b"cuMemAlloc_v2\0")?;
            said("cuMemAlloc", allocate(&raw mut address, bytes))?;
        }
        Ok(address)
    }

    fn upload(&self, to: u64, from: &[u8]) -> Result<(), Failure> {
        // SAFETY: as in `new`; the slice is live, and CUDA checks the GPU's side.
        unsafe {
            let copy: Symbol<unsafe extern "C" fn(u64, *const c_void, usize) -> c_int> =
                self.get(b"cuMemcpyHtoD_v2\0")?;
            said("cuMemcpyHtoD", copy(to, from.as_ptr().cast(), from.len()))
        }
    }

    fn download(&self, from: u64, bytes: usize) -> Result<Vec<u8>, Failure> {
        let mut to = vec![0; bytes];
        // SAFETY: as in `new`; the vector is live, and CUDA checks the GPU's side.
        unsafe {
            let copy: Symbol<unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int> =
                self.get(b"cuMemcpyDtoH_v2\0")?;
            said("cuMemcpyDtoH", copy(to.as_mut_ptr().cast(), from, bytes))?;
        }
        Ok(to)
    }
}

type Symbol<'a, T> = libloading::Symbol<'a, T>;

fn said(what: &str, code: c_int) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        _ => Err(format!("{what} answered {code}").into()),
    }
}
