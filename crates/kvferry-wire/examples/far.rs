//! What `tcp` reaches between two hosts that are far apart, beside a plain socket over the same wire.
//!
//! Usage: `cargo run --release -p kvferry-wire --example far -- [MIB [MB A SECOND]]`

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_transport::memory::HostMemory;
use kvferry_transport::tcp::{Tcp, TcpOptions};
use kvferry_transport::{ByteCopy, Operation, Status, Transport};
use kvferry_wire::{Host, Weather, Wire};

type Failure = Box<dyn Error + Send + Sync>;

const ROUNDS: usize = 5;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1).map(|word| word.parse::<f64>());
    let bytes = (arguments.next().transpose()?.unwrap_or(32.0) * 1048576.0) as usize;
    let rate = arguments.next().transpose()?.unwrap_or(100.0) * 1e6;
    println!(
        "{} MiB at {:.0} MB/s, packets of 1,500 bytes, best of {ROUNDS}",
        bytes >> 20,
        rate / 1e6
    );
    println!(
        "{:>12} {:>8} {:>10} {:>14} {:>14} {:>7}",
        "round trip", "loss", "pieces", "plain MB/s", "tcp MB/s", "ratio"
    );
    for (round_trip, loss) in [(0.0, 0.0), (10.0, 0.0), (10.0, 0.0001), (50.0, 0.0)] {
        for piece in [bytes, 64 << 10, 8 << 10] {
            let wire = Wire::lay(1500)?;
            wire.set(Weather {
                delay_ms: round_trip / 2.0,
                loss,
                rate: Some(rate),
                ..Weather::default()
            })?;
            let ferry = Ferry::between(&wire, bytes)?;
            let socket = Plain::between(&wire, bytes)?;
            let [mut plain, mut ours] = [f64::INFINITY; 2];
            for _ in 0..ROUNDS {
                plain = plain.min(socket.read()?);
                ours = ours.min(ferry.read(piece)?);
            }
            let [plain, ours] = [plain, ours].map(|seconds| bytes as f64 / seconds / 1e6);
            let pieces =
                if piece == bytes { "one".to_owned() } else { format!("{} KiB", piece >> 10) };
            println!(
                "{round_trip:>9} ms {:>6} % {pieces:>10} {plain:>14.1} {ours:>14.1} {:>7.2}",
                loss * 100.0,
                ours / plain
            );
        }
    }
    Ok(())
}

/// The right host reads the left one's memory.
struct Ferry {
    // Ends before the memory that it serves.
    _left: Tcp,
    right: Tcp,
    peer: kvferry_transport::tcp::TcpPeer,
    source: HostMemory,
    destination: HostMemory,
}

impl Ferry {
    fn between(wire: &Wire, bytes: usize) -> Result<Self, Failure> {
        let start = |host: &Host| {
            let bind = (host.address, 0).into();
            host.run(|| Tcp::new(TcpOptions { bind, ..TcpOptions::default() }))
        };
        let (left, right) = (start(&wire.left)??, start(&wire.right)??);
        let (source, destination) = (HostMemory::new(bytes)?, HostMemory::new(bytes)?);
        for at in 0..bytes / 8 {
            source.write(at * 8, &(at as u64).to_le_bytes());
        }
        // SAFETY: both blocks live longer than the transports, which are dropped first.
        unsafe {
            left.register(source.region())?;
            right.register(destination.region())?;
        }
        let description = left.describe()?;
        let peer = wire.right.run(|| right.connect(&description, soon()))??;
        Ok(Self { _left: left, right, peer, source, destination })
    }

    fn read(&self, piece: usize) -> Result<f64, Failure> {
        let pieces = self.source.bytes() / piece;
        // Neighbours apart, so that they are not joined.
        let order = (0..pieces).step_by(2).chain((1..pieces).step_by(2));
        let copies: Vec<ByteCopy> = order
            .map(|at| (at * piece) as u64)
            .map(|at| ByteCopy {
                source: self.source.base() + at,
                destination: self.destination.base() + at,
                bytes: piece as u64,
            })
            .collect();
        let began = Instant::now();
        match self.right.read(&self.peer, &one_by_one(&copies), soon())?.wait(soon()) {
            Status::Done(_) => Ok(began.elapsed().as_secs_f64()),
            other => Err(format!("the read ended as {other:?}").into()),
        }
    }
}

/// A byte to ask, and all bytes in answer.
struct Plain {
    bytes: usize,
    stream: TcpStream,
}

impl Plain {
    fn between(wire: &Wire, bytes: usize) -> Result<Self, Failure> {
        let listener = wire.left.run(|| TcpListener::bind((wire.left.address, 0)))??;
        let address = listener.local_addr()?;
        thread::spawn(move || -> Result<(), Failure> {
            let mut stream = listener.accept()?.0;
            let data = vec![1; 1 << 20];
            while stream.read(&mut [0])? == 1 {
                for _ in 0..bytes >> 20 {
                    stream.write_all(&data)?;
                }
            }
            Ok(())
        });
        let patience = Duration::from_secs(10);
        let stream = wire.right.run(|| TcpStream::connect_timeout(&address, patience))??;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self { bytes, stream })
    }

    fn read(&self) -> Result<f64, Failure> {
        let mut buffer = vec![0; 1 << 20];
        let began = Instant::now();
        (&self.stream).write_all(&[1])?;
        let mut left = self.bytes;
        while left > 0 {
            let most = left.min(buffer.len());
            match (&self.stream).read(&mut buffer[..most])? {
                0 => return Err("the other host hung up".into()),
                count => left -= count,
            }
        }
        Ok(began.elapsed().as_secs_f64())
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}
