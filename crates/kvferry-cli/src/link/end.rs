//! One end of a link: what it offers to the other, and what it measures when it reads from there.

use std::collections::HashMap;
use std::io::Error;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry::{Carrier, TransportOptions};
use kvferry_agent::Source;
use kvferry_layout::{BlockPair, Loops};

use super::host;
use super::memory::{BYTES, Kind, Memory, content, place};
use super::sockets::{self, Server};
use super::words::{Came, Host, Measured, Offer, RUNS, Side, Step, Version, What};

/// How long a connection may take, and the first byte of a read.
const PATIENCE: Duration = Duration::from_secs(5);
/// Small requests, one after the other.
const MOST_TRIPS: usize = 2000;

/// Where one end is to be read.
pub(super) struct Place {
    /// The address that it listens at, and the one that the other end is told.
    pub(super) local: IpAddr,
    pub(super) advertise: Option<IpAddr>,
    /// The first of the ports for what is measured; any free ones with 0.
    pub(super) port: u16,
}

/// A transport, or why it cannot be had here.
type Named = (String, Result<Arc<dyn Carrier>, String>);

/// This end.
pub(super) struct Here {
    carriers: Vec<Named>,
    memory: Arc<Mutex<Memory>>,
    pub(super) sockets: Server,
    pub(super) host: Host,
    told: SocketAddr,
    base: u64,
    seed: u64,
    token: [u8; 16],
}

impl Here {
    pub(super) fn new(place: &Place, kind: Kind, transports: &[String]) -> Result<Self, String> {
        let (mut token, mut seed) = ([0; 16], [0; 8]);
        getrandom::fill(&mut token)
            .and_then(|()| getrandom::fill(&mut seed))
            .map_err(|e| e.to_string())?;
        let seed = u64::from_le_bytes(seed);
        let memory = Memory::new(kind, seed).map_err(|error| error.to_string())?;
        let region = memory.region();
        let memory = Arc::new(Mutex::new(memory));
        // One port each; 0 stays 0.
        let port =
            |number: u16| if place.port == 0 { 0 } else { place.port.saturating_add(number) };
        let of_port = |what: &str, port: u16, error: &Error| {
            format!("{what} on {}: {error}", SocketAddr::new(place.local, port))
        };
        let sockets = Server::start(place.local, port(0), token)
            .map_err(|error| of_port("listening for plain sockets", port(0), &error))?;
        let carriers = transports.iter().zip(1..).map(|(name, number)| {
            let mut options = TransportOptions::new(name.as_str());
            options.bind = SocketAddr::new(place.local, port(number));
            options.advertise = place.advertise;
            // SAFETY: the memory stays mapped until the last clone of it is dropped, and is touched by address alone.
            let carrier = unsafe { options.register(&[region], memory.clone()) };
            (name.clone(), carrier.map_err(|error| error.to_string()))
        });
        let carriers = carriers.collect();
        let advertised = place.advertise.unwrap_or(place.local);
        Ok(Self {
            carriers,
            memory,
            told: SocketAddr::new(advertised, sockets.address.port()),
            sockets,
            host: host::describe(place.local, advertised, kind.to_string()),
            base: region.base,
            seed,
            token,
        })
    }

    /// What the other end is told.
    pub(super) fn side(&self, version: Version, seconds: u64, sees: IpAddr) -> Side {
        let offer = |(name, carrier): &Named| Offer {
            name: name.clone(),
            description: carrier
                .as_ref()
                .map_err(String::clone)
                .and_then(|carrier| carrier.describe().map_err(|error| error.to_string())),
        };
        Side {
            version,
            seconds,
            sees,
            host: self.host.clone(),
            seed: self.seed,
            base: self.base,
            sockets: self.told,
            token: self.token,
            transports: self.carriers.iter().map(offer).collect(),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both ends, as this one sees them.
pub(super) struct Pair {
    sources: HashMap<String, Box<dyn Source>>,
    pub(super) here: Here,
    pub(super) there: Side,
    /// What is there to be read.
    content: Vec<u8>,
    /// Transports that are not tried again.
    broken: Vec<String>,
    /// Bytes a second that plain sockets carried.
    carried: f64,
}

impl Pair {
    pub(super) fn new(here: Here, there: Side) -> Self {
        let (content, sources) = (content(there.seed), HashMap::new());
        Self { sources, here, there, content, broken: vec![], carried: 0.0 }
    }

    /// Of the transports that this end has, those that the other has, too; and why the others are left out.
    pub(super) fn transports(&self) -> (Vec<String>, Vec<String>) {
        let (mut both, mut left_out) = (vec![], vec![]);
        for (name, here) in &self.here.carriers {
            let there = self.there.transports.iter().find(|offer| offer.name == *name);
            match (here, there.map(|offer| &offer.description)) {
                (Ok(_), Some(Ok(_))) => both.push(name.clone()),
                (Err(why), _) => left_out.push(format!("{name}: not on this host: {why}")),
                (_, Some(Err(why))) => {
                    left_out.push(format!("{name}: not on the other host: {why}"));
                }
                (_, None) => left_out.push(format!("{name}: the other end was not asked for it")),
            }
        }
        (both, left_out)
    }

    /// Does what is asked for, in bounded time.
    pub(super) fn measure(&mut self, step: Step) -> Measured {
        let time = Duration::from_millis(step.milliseconds.clamp(20, 600_000));
        let came = match &step.what {
            What::Sockets { connections } => {
                let connections = (*connections).clamp(1, 8);
                sockets::read(self.there.sockets, self.there.token, connections, time)
            }
            What::Read { transport, run } if RUNS.contains(run) => {
                self.with(transport, |pair, source| pair.read(source, *run as usize, time))
            }
            What::Read { run, .. } => Came::Failed(format!("nobody reads runs of {run} bytes")),
            What::RoundTrips { transport } => {
                self.with(transport, |pair, source| pair.round_trips(source, time))
            }
        };
        if let (What::Sockets { .. }, Came::Bytes { gb_per_s, .. }) = (&step.what, &came) {
            self.carried = self.carried.max(gb_per_s * 1e9);
        }
        Measured { step, came }
    }

    /// Does something with the other end's memory, unless that has failed before.
    fn with(&mut self, name: &str, does: impl FnOnce(&Self, &dyn Source) -> Came) -> Came {
        if self.broken.iter().any(|one| one == name) {
            return Came::LeftOut("it failed before".to_owned());
        }
        let came = match self.sources.remove(name).map_or_else(|| self.connect(name), Ok) {
            Ok(source) => {
                let came = does(self, &*source);
                self.sources.insert(name.to_owned(), source);
                came
            }
            Err(came) => came,
        };
        if matches!(came, Came::Unreachable { .. } | Came::Failed(_)) {
            self.broken.push(name.to_owned());
        }
        came
    }

    fn connect(&self, name: &str) -> Result<Box<dyn Source>, Came> {
        let offer = self.there.transports.iter().find(|offer| offer.name == name);
        let carrier = self.here.carriers.iter().find(|(one, _)| one == name);
        let (Some(Offer { description: Ok(description), .. }), Some((_, Ok(carrier)))) =
            (offer, carrier)
        else {
            return Err(Came::Failed("one of the ends does not have it".to_owned()));
        };
        carrier.connect(description, Instant::now() + PATIENCE).map_err(|error| {
            // What NIXL connects to is up to UCX.
            let own = if name == "nixl" { vec![] } else { carrier.endpoints(description) };
            let address = own.first().copied();
            Came::Unreachable { address, why: error.to_string() }
        })
    }

    /// Reads runs for a while, and checks every byte of them.
    fn read(&self, source: &dyn Source, run: usize, time: Duration) -> Came {
        let longest = (PATIENCE + 4 * time).as_secs_f64();
        if self.carried > 0.0 && run as f64 > self.carried * longest {
            let seconds = crate::text::seconds(run as f64 / self.carried);
            return Came::LeftOut(format!("one run takes {seconds} at the rate of plain sockets"));
        }
        let (until, all) = (Instant::now() + time, BYTES / run);
        let (mut count, mut rates, mut sum, mut round) = (1, vec![], (0, 0.0), 0);
        loop {
            let (seconds, packed) = match self.once(source, run, count, round, time) {
                Ok(read) => read,
                Err(came) => return came,
            };
            let over = Instant::now() >= until;
            // What takes no time says nothing about a rate: first as many runs as there are time and memory for.
            if count < all && seconds < time.as_secs_f64() / 8.0 && !over {
                count = (4 * count).min(all);
            } else {
                let bytes = run * count;
                sum = (sum.0 + bytes as u64, sum.1 + seconds);
                rates.push(bytes as f64 / seconds.max(1e-9) / 1e9);
                if over {
                    let (bytes, seconds) = sum;
                    return Came::Bytes { bytes, seconds, gb_per_s: median(&mut rates), packed };
                }
            }
            round += 1;
        }
    }

    /// One small request after the other.
    fn round_trips(&self, source: &dyn Source, time: Duration) -> Came {
        let (until, mut trips) = (Instant::now() + time, vec![]);
        while trips.len() < MOST_TRIPS && (trips.is_empty() || Instant::now() < until) {
            match self.once(source, RUNS[0] as usize, 1, trips.len(), time) {
                Ok((seconds, _)) => trips.push(1e6 * seconds),
                Err(came) => return came,
            }
        }
        let worst_us = trips.iter().copied().fold(0.0, f64::max);
        Came::Trips { count: trips.len() as u64, median_us: median(&mut trips), worst_us }
    }

    /// Reads so many runs once, as engines would, and checks every byte. Answers the seconds that it took, and whether the
    /// runs were packed.
    fn once(
        &self,
        source: &dyn Source,
        run: usize,
        count: usize,
        round: usize,
        time: Duration,
    ) -> Result<(f64, bool), Came> {
        let failed = |error: &dyn std::fmt::Display| Came::Failed(error.to_string());
        self.here.memory().poison(round, run * count).map_err(|e| failed(&e))?;
        let mut loops = Loops::default();
        let pair = |index: usize| BlockPair {
            source: index as u32,
            destination: (place(index, run) / run) as u32,
        };
        let table = loops.add_table((0..count).map(pair));
        let (from, to) = (self.there.base, self.here.base + BYTES as u64);
        let blocks = (run as u64, run as u64);
        loops.add_nest((from, to), run as u64, blocks, &[], table).map_err(|e| failed(&e))?;
        let packed = (run as u64) < source.packs_below();
        let began = Instant::now();
        let deadline = began + PATIENCE + 4 * time;
        let read = match packed {
            true => source.read_packed(&loops, deadline),
            false => source.read(&loops, deadline),
        };
        let read = read.map_err(|e| failed(&e))?;
        let status = read.wait(deadline + Duration::from_secs(1));
        let seconds = began.elapsed().as_secs_f64();
        match status.outcome() {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(failed(error)),
            None => return Err(Came::Failed("it does not end at its deadline".to_owned())),
        }
        match self.here.memory().check(&self.content, run, count).map_err(|e| failed(&e))? {
            Some(corrupt) => Err(corrupt),
            None => Ok((seconds, packed)),
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
