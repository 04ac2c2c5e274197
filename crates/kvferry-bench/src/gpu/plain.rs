//! Plain sockets: what the network carries by itself, from and to memory of the host.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::Failure;

/// Bytes of a call, and of the memory that each side of a socket goes round and round in: as many as the slots that a
/// connection of `tcp` has in use.
const CALL: usize = 1 << 20;
const BUFFER: usize = 3 << 20;

/// Listens, and serves so many sockets until they are closed.
pub(super) fn serve(count: usize) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let at = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().take(count).flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    Ok(at)
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let buffer = vec![7; BUFFER];
    let mut asked = [0; 8];
    loop {
        stream.read_exact(&mut asked)?;
        each_call(u64::from_le_bytes(asked), |at, bytes| {
            stream.write_all(&buffer[at..at + bytes])
        })?;
    }
}

fn each_call(
    bytes: u64,
    mut call: impl FnMut(usize, usize) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let (mut left, mut at) = (bytes as usize, 0);
    while left > 0 {
        let now = left.min(CALL);
        call(at, now)?;
        left -= now;
        at = (at + CALL) % BUFFER;
    }
    Ok(())
}

/// Seconds until the sockets have carried so many bytes together.
pub(super) fn receive(streams: &[TcpStream], bytes: u64) -> Result<f64, Failure> {
    let each = bytes.div_ceil(streams.len().max(1) as u64);
    let began = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .map(|mut stream| {
                scope.spawn(move || {
                    let mut buffer = vec![0; BUFFER];
                    stream.write_all(&each.to_le_bytes())?;
                    each_call(each, |at, bytes| stream.read_exact(&mut buffer[at..at + bytes]))
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => Ok(done?),
            Err(_) => Err("a thread has panicked".into()),
        })
    })
    .map(|()| began.elapsed().as_secs_f64())
}

/// Seconds of a core that AES-128-GCM takes by itself to seal a GB, and to open it: in pieces as long as those of `tcp`, in
/// memory as cold as that of its slots.
pub(super) fn cipher() -> Result<(f64, f64), Failure> {
    const PIECE: usize = 128 << 10;
    let key = UnboundKey::new(&AES_128_GCM, &[7; 16]).map_err(|_| "ring takes no key")?;
    let key = LessSafeKey::new(key);
    let number = || Nonce::assume_unique_for_key([0; 12]);
    let mut memory = vec![7; 64 << 20];
    let rounds = 8;
    let (mut sealing, mut opening) = (0.0, 0.0);
    for _ in 0..rounds {
        let began = Instant::now();
        let seal = |piece: &mut [u8]| key.seal_in_place_separate_tag(number(), Aad::empty(), piece);
        let tags: Result<Vec<_>, _> = memory.chunks_mut(PIECE).map(seal).collect();
        sealing += began.elapsed().as_secs_f64();
        let began = Instant::now();
        for (piece, tag) in memory.chunks_mut(PIECE).zip(tags.map_err(|_| "it does not seal")?) {
            key.open_in_place_separate_tag(number(), Aad::empty(), tag, piece, 0..)
                .map_err(|_| "it does not open")?;
        }
        opening += began.elapsed().as_secs_f64();
    }
    let gb = (rounds * memory.len()) as f64 / 1e9;
    Ok((sealing / gb, opening / gb))
}

/// Seconds of CPUs that this process has taken.
pub(super) fn cpu_seconds() -> f64 {
    // SAFETY: all zeros are a valid answer, which the call overwrites.
    let usage = unsafe {
        let mut usage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
