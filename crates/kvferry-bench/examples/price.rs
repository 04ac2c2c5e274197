//! What a read costs over each back end, between two processes of this machine: the figures behind
//! `Transport::price`.
//!
//! Prints, in nanoseconds, what one operation takes, what one further copy takes and what one byte
//! takes, and how well the three add up to reads in pieces of other sizes.
//!
//! Usage: `cargo run --release -p kvferry-bench --example price [local|tcp|nixl]...`
//! (`UCX_TLS=tcp` in the environment gives NIXL's figures over its own TCP.)

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_nixl::{Nixl, NixlOptions};
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::tcp::{Tcp, TcpOptions};
use kvferry_transport::{ByteCopy, Operation, Price, Status, Transport};

type Failure = Box<dyn Error>;

const BYTES: usize = 256 << 20;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [serve, name] = &arguments[..]
        && serve == "serve"
    {
        return match name.as_str() {
            "local" => serve_memory(&Local::new(LocalOptions::default())?),
            "tcp" => serve_memory(&Tcp::new(TcpOptions::default())?),
            _ => serve_memory(&Nixl::new(&NixlOptions::default())?),
        };
    }
    let all = ["local", "tcp", "nixl"].map(str::to_owned);
    for name in if arguments.is_empty() { &all[..] } else { &arguments[..] } {
        match name.as_str() {
            "local" => measure(&Local::new(LocalOptions::default())?)?,
            "tcp" => measure(&Tcp::new(TcpOptions::default())?)?,
            "nixl" => measure(&Nixl::new(&NixlOptions::default())?)?,
            other => return Err(format!("no back end is called {other}").into()),
        }
    }
    Ok(())
}

/// The process that is read.
fn serve_memory<T: Transport>(transport: &T) -> Result<(), Failure> {
    // UCX writes its warnings to the standard output, which is spoken for.
    let mut output = std::fs::File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    // SAFETY: both descriptors are open, and nobody owns the standard output.
    assert_eq!(unsafe { libc::dup2(2, 1) }, 1);
    let memory = HostMemory::new(BYTES)?;
    memory.write(0, &vec![7; BYTES]);
    // SAFETY: the memory is only touched through its address, and taken back below.
    let region = unsafe { transport.register(memory.region()) }?;
    let hex: String = transport.describe()?.iter().map(|b| format!("{b:02x}")).collect();
    writeln!(output, "{} {hex}", memory.base())?;
    std::io::stdin().lock().lines().for_each(drop);
    transport.deregister(region, soon())?;
    Ok(())
}

fn measure<T: Transport>(transport: &T) -> Result<(), Failure> {
    let process = Served::start(transport.name())?;
    let memory = HostMemory::new(BYTES)?;
    memory.write(0, &vec![1; BYTES]);
    // SAFETY: the memory is only touched through its address, and taken back below.
    let region = unsafe { transport.register(memory.region()) }?;
    let peer = transport.connect(&process.description, soon())?;
    let copies = |piece: usize, count: usize| -> Vec<ByteCopy> {
        // Apart from each other and in no order, so that none are merged.
        let cells = BYTES / piece;
        (0..count)
            .map(|i| ByteCopy {
                source: process.base + ((i * 7919 + 1) % cells * piece) as u64,
                destination: memory.base() + (i * (cells / count) * piece) as u64,
                bytes: piece as u64,
            })
            .collect()
    };
    // The best of a few, in nanoseconds: what else runs on the machine is not the price of the
    // transport.
    let time = |copies: &[ByteCopy], rounds: usize| -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for _ in 0..=rounds {
            let began = Instant::now();
            let operation = transport.read(&peer, copies, soon())?;
            match operation.wait(soon()) {
                Status::Done(_) => best = best.min(began.elapsed().as_nanos() as f64),
                other => return Err(format!("a read ended as {other:?}").into()),
            }
        }
        Ok(best)
    };
    const MANY: usize = 20_000;
    let launch = time(&copies(64, 1), 201)?;
    let byte = (time(&copies(BYTES, 1), 7)? - launch) / BYTES as f64;
    let copy = (time(&copies(64, MANY), 9)? - launch) / MANY as f64 - 64.0 * byte;
    let price = Price { launch, copy, byte };
    println!(
        "{}: launch {launch:.0} ns, copy {copy:.0} ns, byte {byte:.4} ns ({:.2} GB/s)",
        transport.name(),
        1.0 / byte
    );
    for (piece, count) in [(512, 20_000), (4 << 10, 20_000), (64 << 10, 2000), (1 << 20, 200)] {
        let took = time(&copies(piece, count), 7)?;
        let said = price.of(count as u64, (piece * count) as u64);
        println!("  {count} copies of {piece} bytes: {:.2} of what the price says", took / said);
    }
    transport.disconnect(&peer);
    transport.deregister(region, soon())?;
    Ok(())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

struct Served {
    child: Child,
    base: u64,
    description: Vec<u8>,
}

impl Served {
    fn start(name: &str) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or("no pipe from the process that is read")?;
        BufReader::new(output).read_line(&mut line)?;
        let (base, hex) = line.trim_end().split_once(' ').ok_or("it does not start")?;
        let description = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16))
            .collect::<Result<_, _>>()?;
        Ok(Self { base: base.parse()?, child, description })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
