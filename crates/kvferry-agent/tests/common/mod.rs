//! A small engine for tests: real memory, real agents, one state whose every byte is known.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test binary uses its own part of it"
)]

pub mod certificates;
pub mod engine;
pub mod faulty;
pub mod held;
pub mod log;
pub mod looping;
pub mod memory;
pub mod wire;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use engine::{By, Engine, Recipe, load};
use kvferry_agent::{BlockTable, Grant};
pub use wire::Wire;

pub const HEADS: u64 = 4;
pub const DIM: u64 = 64;
pub const TOKENS_PER_BLOCK: u64 = 4;
pub const BLOCKS: u32 = 64;
/// Long enough for whatever must happen; a test that gets here has failed.
pub const LONG: Duration = Duration::from_secs(60);

/// Waits for something to become so.
pub fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !so() {
        assert!(Instant::now() < until, "never happened: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Where nobody listens, and nobody will by chance: below the ports that the kernel hands out by itself.
pub fn quiet_address() -> SocketAddr {
    const PORTS: Range<u16> = 20_000..32_000;
    // Each call has another port, and each process begins elsewhere.
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id().wrapping_mul(1009);
    loop {
        let next = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).into());
        let port = PORTS.start + (next % PORTS.len() as u32) as u16;
        let address = (Ipv4Addr::LOCALHOST, port).into();
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

pub fn blocks_for(tokens: u64, first: u32) -> Vec<u32> {
    (first..first + tokens.div_ceil(TOKENS_PER_BLOCK) as u32).collect()
}

pub fn table(blocks: &[u32]) -> Vec<BlockTable> {
    vec![BlockTable { first: 0, blocks: blocks.to_vec() }]
}

/// A grant of so many tokens in these blocks.
pub fn granted(blocks: &[u32], tokens: u64) -> Grant {
    Grant { epoch: 0, tokens, tables: table(blocks) }
}

/// The byte of a request at a place, free of any parallelism; never [`memory::UNTOUCHED`].
pub fn value(request: u64, token: u64, head: u64, dim: u64) -> u8 {
    let mixed = request
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(token * 0x1_0003 + head * 0x101 + dim)
        .wrapping_mul(0xD6E8_FEB8_6659_FD93);
    ((mixed >> 40) % 200) as u8
}
