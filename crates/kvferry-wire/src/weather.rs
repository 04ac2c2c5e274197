//! What happens to packets on their way.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::Error;

/// How packets fare, in all directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Weather {
    /// How long each takes, in milliseconds.
    pub delay_ms: f64,
    /// How much longer some take, at random: those overtake each other.
    pub jitter_ms: f64,
    /// The share that is lost.
    pub loss: f64,
    /// Bytes a second that each host may send; `None` for as many as there are.
    pub rate: Option<f64>,
    /// Nothing passes.
    pub cut: bool,
}

impl Weather {
    pub(crate) fn checked(self) -> Result<Self, Error> {
        let sane = |what, found: f64, most: f64| match (0.0..=most).contains(&found) {
            true => Ok(()),
            false => Err(Error::Weather { what, found }),
        };
        sane("delay_ms", self.delay_ms, 60_000.0)?;
        sane("jitter_ms", self.jitter_ms, 60_000.0)?;
        sane("loss", self.loss, 1.0)?;
        match self.rate {
            Some(rate) if !(rate.is_finite() && rate > 0.0) => {
                Err(Error::Weather { what: "rate", found: rate })
            }
            _ => Ok(self),
        }
    }
}

/// How long a packet may wait for those before it at a given rate: a switch's buffer.
const BUFFER: Duration = Duration::from_millis(100);
/// How soon a thread notices that all is over.
const GLANCE: Duration = Duration::from_millis(100);

/// When it arrives, which one it is, and the packet.
type Due = Reverse<(Instant, u64, Vec<u8>)>;

/// Two threads for each host: what it sends, and what it receives.
pub(crate) fn carry(
    hosts: &[Arc<File>],
    weather: &Arc<Mutex<Weather>>,
    over: &Arc<AtomicBool>,
) -> Vec<JoinHandle<()>> {
    let (senders, receivers): (Vec<_>, Vec<_>) = hosts.iter().map(|_| bounded(1 << 16)).unzip();
    let mut threads = vec![];
    for (host, receiver) in hosts.iter().zip(receivers) {
        let (to, done) = (Arc::clone(host), Arc::clone(over));
        threads.push(thread::spawn(move || deliver(&receiver, &to, &done)));
        let (from, senders) = (Arc::clone(host), senders.clone());
        let (weather, over) = (Arc::clone(weather), Arc::clone(over));
        threads.push(thread::spawn(move || take(&from, &senders, &weather, &over)));
    }
    threads
}

/// Whose a packet is: the hosts' IPv4 addresses end with 1, 2, and so on.
fn receiver<'a>(packet: &[u8], hosts: &'a [Sender<Due>]) -> Option<&'a Sender<Due>> {
    let last = packet.get(19).filter(|_| packet[0] >> 4 == 4)?;
    hosts.get(usize::from(*last).checked_sub(1)?)
}

/// Decides the fate of each packet as it is sent.
fn take(mut from: &File, hosts: &[Sender<Due>], weather: &Mutex<Weather>, over: &AtomicBool) {
    let mut dice = fastrand::Rng::with_seed(7);
    let mut packet = vec![0; 1 << 16];
    // When the wire has sent everything before.
    let mut free = Instant::now();
    for number in 0.. {
        if !readable(from, over) {
            return;
        }
        let Ok(length) = from.read(&mut packet) else { return };
        let Some(to) = receiver(&packet[..length], hosts) else { continue };
        let (now, weather) = (Instant::now(), *weather.lock());
        if weather.cut || dice.f64() < weather.loss {
            continue;
        }
        let mut sent = now;
        if let Some(rate) = weather.rate {
            free = free.max(now);
            if free - now > BUFFER {
                continue;
            }
            free += Duration::from_secs_f64(length as f64 / rate);
            sent = free;
        }
        let late = weather.delay_ms + weather.jitter_ms * dice.f64();
        let due = sent + Duration::from_secs_f64(late / 1e3);
        // A queue that is full loses what comes.
        let _ = to.try_send(Reverse((due, number, packet[..length].to_vec())));
    }
}

/// Waits for a packet; `false` when all is over.
fn readable(from: &File, over: &AtomicBool) -> bool {
    let mut wanted = libc::pollfd { fd: from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    while !over.load(Ordering::Relaxed) {
        // SAFETY: one structure is passed, and its number is 1.
        match unsafe { libc::poll(&mut wanted, 1, GLANCE.as_millis() as i32) } {
            1 => return true,
            0 => {}
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
    false
}

/// Gives each packet to the other host when its time has come.
fn deliver(receiver: &Receiver<Due>, mut to: &File, over: &AtomicBool) {
    let mut waiting: BinaryHeap<Due> = BinaryHeap::new();
    while !over.load(Ordering::Relaxed) {
        let next = waiting.peek().map(|Reverse((due, ..))| *due);
        let glance = Instant::now() + GLANCE;
        match receiver.recv_deadline(next.map_or(glance, |due| due.min(glance))) {
            Ok(packet) => waiting.push(packet),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        waiting.extend(receiver.try_iter());
        let now = Instant::now();
        while waiting.peek().is_some_and(|Reverse((due, ..))| *due <= now) {
            if let Some(Reverse((.., packet))) = waiting.pop() {
                // A host whose queue is full loses what comes, as any does.
                let _ = to.write(&packet);
            }
        }
    }
}
