//! The worker's listener, through which its own scheduler hands it tasks.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_digest::{Held, Program};
use kvferry_layout::Manifest;
use tracing::{debug, warn};

use crate::background::{Background, after};
use crate::carrier::Carrier;
use crate::error::Error;
use crate::rules::grant::Grant;
use crate::source::steps::Steps;
use crate::wire::listener::{Host, Listener, advertised, listen};
use crate::wire::message::{Question, Reply, ServiceCard, Welcome};
use crate::wire::places::Limits;
use crate::wire::task::{Task, TaskReply, Token};
use crate::wire::ticket::Incarnation;
use crate::worker::options::WorkerOptions;

/// A rank that takes tasks.
#[derive(Debug)]
pub(crate) struct Service {
    token: Token,
    rank: Arc<Rank>,
    steps: Arc<Steps>,
}

/// What a task needs of the rank.
#[derive(Debug)]
struct Rank {
    manifest: Arc<Manifest>,
    carrier: Arc<dyn Carrier>,
}

impl Service {
    /// Begins to listen, on the worker's own thread. What it returns is for the rank's card.
    pub(crate) fn start(
        options: &WorkerOptions,
        manifest: Arc<Manifest>,
        carrier: Arc<dyn Carrier>,
        steps: Arc<Steps>,
        background: &Background,
    ) -> Result<ServiceCard, Error> {
        options.trust.check_bind(options.bind)?;
        let (socket, bound) = listen(options.bind, options.ports.as_ref(), background.handle())?;
        let address = advertised(options.advertise.as_deref(), bound)?;
        let mut token = Token([0; 16]);
        getrandom::fill(&mut token.0)?;
        let service = Self { token, rank: Arc::new(Rank { manifest, carrier }), steps };
        // One scheduler, and another while it restarts.
        let limits = Limits { connections: 16, strangers: 512, ..Limits::default() };
        let listener = Arc::new(Listener::new(options.trust.clone(), options.version, limits));
        background.spawn(listener.serve(socket, Arc::new(service)));
        Ok(ServiceCard { address, near: near(bound).to_string(), place: place(), token })
    }
}

/// Where those who are in the same place find whoever listens there.
fn near(mut bound: SocketAddr) -> SocketAddr {
    match bound.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => bound.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => bound.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    bound
}

/// Names the place where addresses lead to the same as here: this run of the host, and the network of this process.
pub(super) fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = fs::read_link("/proc/self/ns/net");
    match (boot, network) {
        (Ok(boot), Ok(network)) => format!("{} {}", boot.trim(), network.display()),
        _ => String::new(),
    }
}

impl Host for Service {
    fn welcome(&self) -> Welcome {
        // Leases, and the life that they belong to, are the scheduler's.
        let engine = self.rank.manifest.engine().to_owned();
        Welcome { engine, incarnation: Incarnation(0), term_ms: 0 }
    }

    async fn answer(&self, who: &str, question: Question) -> Reply {
        match question {
            Question::Ping => Reply::Done,
            Question::Do { token, patience_ms, task: Task::Written { step, known }, .. }
                if token == self.token =>
            {
                let patience = Duration::from_millis(patience_ms);
                Reply::Task(self.steps.written(step, known, patience).await)
            }
            Question::Do { token, grant, patience_ms, task } if token == self.token => {
                let (rank, until) = (self.rank.clone(), after(Duration::from_millis(patience_ms)));
                let done = tokio::task::spawn_blocking(move || rank.work(&grant, &task, until));
                let reply = done.await;
                let reply =
                    reply.unwrap_or_else(|_| TaskReply::Gone("the task broke off".to_owned()));
                debug!(who, done = !matches!(reply, TaskReply::Gone(_)), "did a task");
                Reply::Task(reply)
            }
            Question::Do { .. } => {
                warn!(
                    who,
                    "somebody else than the engine's own scheduler hands out tasks: refused"
                );
                Reply::Refused("only the engine's own scheduler gives tasks to a rank".to_owned())
            }
            _ => Reply::Refused("this is a rank: ask the engine's scheduler".to_owned()),
        }
    }
}

impl Rank {
    /// Does a task, until its time is up.
    fn work(&self, grant: &Grant, task: &Task, until: Instant) -> TaskReply {
        match task {
            Task::Digest { key, parts } => {
                let tables: Vec<(u64, &[u32])> =
                    grant.tables.iter().map(|table| (table.first, &table.blocks[..])).collect();
                let held = Held { manifest: &self.manifest, tokens: grant.tokens, tables: &tables };
                let program = match Program::new(held, key, parts) {
                    Ok(program) => program,
                    Err(error) => return TaskReply::Refused(error.to_string()),
                };
                // Whoever reads every byte that there is asks for no more. Others wait meanwhile.
                let all = self.manifest.regions().iter().map(|region| region.bytes).sum();
                if program.bytes() > all {
                    let asked = program.bytes();
                    return TaskReply::Refused(format!("{asked} bytes to look at, of {all}"));
                }
                match self.carrier.digest(&program, until) {
                    Ok(digests) => TaskReply::Digests(digests),
                    Err(error @ kvferry_transport::Error::Unsupported(_)) => {
                        TaskReply::Unable(error.to_string())
                    }
                    Err(error) => TaskReply::Gone(error.to_string()),
                }
            }
            // It needs nothing of the rank, and is answered before it comes here.
            Task::Written { .. } => TaskReply::Unable("there is nothing to look at".to_owned()),
        }
    }
}
