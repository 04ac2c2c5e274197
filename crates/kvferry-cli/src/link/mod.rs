//! `kvferry link`: what carries KV caches between two hosts, before there are engines.
//!
//! * `words`: what the two ends say to each other, and the report. `end`: what one of them offers and measures, with
//!   `memory`, whose every byte is checked, and plain `sockets` as the yardstick.
//! * `host`: interfaces, and what the kernel says of a connection. `verdict`: what is wrong. `show`: for people.

use std::io::{IsTerminal, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use clap::Args;
use kvferry_agent::{Conversation, KEY_VARIABLE, Key, Listening, PeerError, Trust};
use kvferry_transport::strangers::Mentions;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::output;
use crate::reach::{Proof, check_address};
use crate::text;
use end::{Here, Pair, Place};
use memory::Kind;
use words::{Answer, Ask, End, LONGEST, RUNS, Report, SOCKETS, Side, Step, VERSION, Version, What};

mod end;
mod host;
mod memory;
mod show;
mod sockets;
mod verdict;
mod words;

/// Test what carries KV caches between two hosts, before there are engines.
///
/// On one host start 'kvferry link --listen'; it prints the command for the other. Each host then reads from the other, over
/// each transport that both have and over plain sockets: every byte is checked, and what is wrong is said, with what to do.
///
/// Exit codes, on both hosts: 0 the link is fine, 2 something is wrong, 1 there was no test.
///
/// Both ends prove to each other that they hold the same key: in a file, or in the environment (KVFERRY_KEY); or both use TLS.
/// Without, the end that listens makes a key for this one test.
#[derive(Debug, Args)]
#[group(id = "which_end", required = true, multiple = false, args = ["listener", "listen"])]
pub(crate) struct Link {
    /// Where 'kvferry link --listen' runs, as host:port.
    #[arg(value_name = "HOST:PORT")]
    listener: Option<String>,
    /// Wait here for the other end, serve one test, and end.
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = "0.0.0.0:7411")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    proof: Proof,
    /// Whose memory is read from and into on this side: host, or gpu:N.
    #[arg(long, default_value = "host")]
    memory: Kind,
    /// The transports to test, of those that both hosts have.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "tcp,nixl", value_parser = ["tcp", "nixl"])]
    transport: Vec<String>,
    /// How long to measure, in all: that of the end that connects counts.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// How long to wait for the other end, in seconds: 10 to connect, 600 to be connected to.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: Option<u64>,
    /// The first of three ports that the other host connects to for what is measured; any free ones without.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..=65533))]
    data_port: Option<u16>,
    /// The address at which the other host reaches this one, where that is not one of its own.
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<IpAddr>,
    /// Print the report as JSON, and nothing else.
    #[arg(long)]
    json: bool,
}

/// As which both ends present themselves.
const NAME: &str = "kvferry link";
/// How long each message may take, and libraries to load.
const PATIENCE: Duration = Duration::from_secs(60);
const WRONG: u8 = 2;

impl Link {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let trust = self.proof.trust()?;
        let report = match (&self.listener, self.listen) {
            (Some(address), _) => self.test(address, &trust),
            (None, Some(bind)) => self.serve(bind, trust),
            (None, None) => Err(Failure::input("give host:port, or --listen")),
        };
        self.progress("");
        let report = report?;
        output::print(&match self.json {
            true => serde_json::to_string_pretty(&report).map_err(Failure::input)? + "\n",
            false => show::told(&report),
        });
        if report.works { Ok(()) } else { Err(Failure::Said(WRONG)) }
    }

    /// The end that connects, and says what to do.
    fn test(&self, address: &str, trust: &Trust) -> Result<Report, Failure> {
        check_address(address)?;
        let patience = self.timeout.unwrap_or(10);
        let deadline = Instant::now() + Duration::from_secs(patience);
        self.progress(&format!("connects to {address}"));
        let mut conversation = Conversation::open(address, trust, NAME, deadline)
            .map_err(|error| not_connected(address, patience, &error))?;
        if conversation.who() != NAME {
            return Err(Failure::input(format!(
                "at {address} listens the engine '{}', not a link test: it can be reached and has the same key, and that is \
                 all that it tells. Start 'kvferry link --listen' on that host, at another port",
                show::plain(conversation.who())
            )));
        }
        let gone =
            |error: PeerError| Failure::input(format!("{address} broke off the test: {error}"));
        let here = self.here(&conversation).map_err(Failure::Input)?;
        let side = here.side(this_version(), self.seconds, far(&conversation)?);
        say(&mut conversation, &side).map_err(gone)?;
        let there = other_side(&hear(&mut conversation, PATIENCE).map_err(gone)?)?;
        let mut pair = Pair::new(here, there);
        let (transports, left_out) = pair.transports();
        let all = steps(&transports);
        let milliseconds = 1000 * self.seconds / all.len() as u64;
        let mut measured = vec![];
        for (number, (reader, what)) in all.iter().enumerate() {
            let reads =
                if *reader == End::Tester { "this host reads" } else { "the other host reads" };
            self.progress(&format!("{} of {}: {reads}, {what}", number + 1, all.len()));
            let step = Step { reader: *reader, what: what.clone(), milliseconds };
            measured.push(match reader {
                End::Tester => pair.measure(step),
                End::Listener => {
                    say(&mut conversation, &Ask::Measure(step)).map_err(gone)?;
                    let patience = PATIENCE + 10 * Duration::from_millis(milliseconds);
                    match read(&hear(&mut conversation, patience).map_err(gone)?)? {
                        Answer::Measured(measured) => measured,
                        Answer::Sent(_) => return Err(nonsense()),
                    }
                }
            });
        }
        say(&mut conversation, &Ask::Sent).map_err(gone)?;
        let Answer::Sent(sent_by_listener) =
            read(&hear(&mut conversation, PATIENCE).map_err(gone)?)?
        else {
            return Err(nonsense());
        };
        let mut report = Report {
            works: true,
            tester: pair.here.host.clone(),
            listener: pair.there.host.clone(),
            tester_seen_at: pair.there.sees,
            listener_seen_at: far(&conversation)?,
            path: host::path(conversation.socket()),
            sent_by_tester: pair.here.sockets.sent(),
            sent_by_listener,
            measured,
            left_out,
            findings: vec![],
        };
        report.findings = verdict::findings(&report);
        report.works = report.findings.iter().all(|finding| !finding.wrong);
        // Whatever becomes of the other end now, this one has seen what there is to see.
        _ = say(&mut conversation, &Ask::End(Box::new(report.clone())));
        Ok(report)
    }

    /// The end that is connected to, and does what it is asked for.
    fn serve(&self, bind: SocketAddr, trust: Trust) -> Result<Report, Failure> {
        let (trust, secret) = match trust {
            Trust::Loopback => one_time_key()?,
            trust => (trust, None),
        };
        let listening = Listening::start(bind, trust).map_err(Failure::input)?;
        self.announce(listening.address(), secret.as_deref());
        let patience = Duration::from_secs(self.timeout.unwrap_or(600));
        let deadline = Instant::now() + patience;
        let mut mentions: Mentions = Mentions::default();
        // Once a minute for each place that they come from.
        let mut turned_away = |from: SocketAddr, error: &PeerError| {
            if mentions.mention(from.ip().into(), Instant::now()).is_some() {
                eprintln!("turned {from} away: {error}");
            }
        };
        let mut conversation = loop {
            let Some(conversation) = listening.accept(NAME, deadline, &mut turned_away) else {
                return Err(Failure::input(format!(
                    "nobody has connected to {} for {}: see that the other host was given the command above, and that nothing \
                     between the two drops TCP connections to this port",
                    listening.address(),
                    text::seconds(patience.as_secs_f64())
                )));
            };
            if conversation.who() == NAME {
                break conversation;
            }
            eprintln!("turned one away: it is '{}', and no link test", conversation.who());
        };
        // One test: others find nobody here.
        drop(listening);
        let from = far(&conversation)?;
        self.progress(&format!("{from} has connected"));
        let gone = |error: PeerError| Failure::input(format!("{from} broke off the test: {error}"));
        let theirs = hear(&mut conversation, PATIENCE).map_err(gone)?;
        let here = match self.here(&conversation) {
            Ok(here) => here,
            Err(problem) => {
                // Where it is not heard there, it is here.
                _ = say(
                    &mut conversation,
                    &Version { unable: Some(problem.clone()), ..this_version() },
                );
                return Err(Failure::Input(problem));
            }
        };
        let side = here.side(this_version(), self.seconds, from);
        // Whatever it is: the other end then knows the version of this one.
        say(&mut conversation, &side).map_err(gone)?;
        let there = other_side(&theirs)?;
        // Failures cost time beside the measuring.
        let longest = Duration::from_secs(there.seconds.min(3600));
        let deadline = Instant::now() + 10 * longest + 5 * PATIENCE;
        let mut pair = Pair::new(here, there);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let patience = left.min(2 * longest + 2 * PATIENCE);
            let answer = match read(&hear(&mut conversation, patience).map_err(gone)?)? {
                Ask::Measure(step) => {
                    self.progress(&format!("this host reads, {}", step.what));
                    let milliseconds = step.milliseconds.min(1000 * longest.as_secs());
                    let measured = pair.measure(Step { milliseconds, ..step });
                    self.progress("the other host reads");
                    Answer::Measured(measured)
                }
                Ask::Sent => Answer::Sent(pair.here.sockets.sent()),
                Ask::End(report) => return Ok(*report),
            };
            say(&mut conversation, &answer).map_err(gone)?;
        }
    }

    /// This end, at the address that the other is connected to.
    fn here(&self, conversation: &Conversation) -> Result<Here, String> {
        let local = conversation.socket().local_addr().map_err(|error| error.to_string())?;
        let local = local.ip().to_canonical();
        let (advertise, port) = (self.advertise, self.data_port.unwrap_or(0));
        self.progress("prepares memory and transports");
        Here::new(&Place { local, advertise, port }, self.memory, &self.transport)
    }

    /// Says what to do on the other host.
    fn announce(&self, at: SocketAddr, secret: Option<&str>) {
        let addresses: Vec<(IpAddr, String)> = match (self.advertise, at.ip().is_unspecified()) {
            (Some(address), _) => vec![(address, String::new())],
            (None, false) => vec![(at.ip(), String::new())],
            (None, true) => reachable(at.ip()),
        };
        let before = secret.map_or_else(String::new, |secret| format!("{KEY_VARIABLE}={secret} "));
        let after = match (&self.proof.key_file, secret) {
            (Some(file), _) => format!(" --key-file {}", file.display()),
            (None, Some(_)) => String::new(),
            (None, None) if self.proof.tls_certificate.is_some() => {
                "    # with a certificate of the same authority".to_owned()
            }
            (None, None) => format!("    # with the same {KEY_VARIABLE}"),
        };
        let mut text = format!("listens on {at}. On the other host run\n\n");
        for (address, interface) in addresses {
            let to = SocketAddr::new(address, at.port());
            text += &format!("    {before}kvferry link {to}{after}{interface}\n");
        }
        text.push('\n');
        // With JSON, standard output is the report's alone.
        if self.json {
            eprint!("{text}");
        } else {
            output::print(&text);
        }
    }

    /// What is under way, in one line of a terminal.
    fn progress(&self, doing: &str) {
        let mut terminal = std::io::stderr();
        if !self.json && terminal.is_terminal() {
            // Nothing is lost where it cannot be shown.
            _ = write!(terminal, "\r\x1b[2K{doing}");
            _ = terminal.flush();
        }
    }
}

/// The addresses that others may reach this host at, each with its interface as a comment for a shell.
fn reachable(bound: IpAddr) -> Vec<(IpAddr, String)> {
    let link_local = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let all = host::addresses().into_iter().filter(|(address, _)| {
        !address.is_loopback() && !link_local(address) && (address.is_ipv4() || bound.is_ipv6())
    });
    let found: Vec<_> = all
        .map(|(address, name)| {
            let speed = host::interface(std::path::Path::new(host::SYSTEM), &name).megabits;
            let speed =
                speed.map_or_else(String::new, |speed| format!(", {}", verdict::gigabits(speed)));
            (address, format!("    # {name}{speed}"))
        })
        .collect();
    match found.is_empty() {
        true => vec![(Ipv4Addr::LOCALHOST.into(), String::new())],
        false => found,
    }
}

/// A key for one test, and the secret that it is made from.
fn one_time_key() -> Result<(Trust, Option<String>), Failure> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(Failure::input)?;
    let secret = format!("{:032x}", u128::from_le_bytes(secret));
    let key = Key::new(secret.as_bytes()).map_err(Failure::input)?;
    Ok((Trust::Key(key), Some(secret)))
}

fn not_connected(address: &str, patience: u64, error: &PeerError) -> Failure {
    let advice = match error {
        PeerError::Slow(_) => format!(
            " (nothing came from there for {patience} s): a firewall drops what goes from here to {address}, or that host is \
             down. Let TCP connections from here to that port through"
        ),
        PeerError::Io { kind: std::io::ErrorKind::ConnectionRefused, .. } => {
            ": nothing listens there. Start 'kvferry link --listen' on that host first".to_owned()
        }
        _ => String::new(),
    };
    Failure::input(format!("cannot connect to {address}: {error}{advice}"))
}

/// What is measured, in this order: the yardstick first.
fn steps(transports: &[String]) -> Vec<(End, What)> {
    let mut all = vec![];
    for reader in End::BOTH {
        all.extend(SOCKETS.map(|connections| (reader, What::Sockets { connections })));
        for transport in transports {
            let transport = || transport.clone();
            all.push((reader, What::RoundTrips { transport: transport() }));
            all.extend(RUNS.map(|run| (reader, What::Read { transport: transport(), run })));
        }
    }
    all
}

fn far(conversation: &Conversation) -> Result<IpAddr, Failure> {
    Ok(conversation.socket().peer_addr().map_err(Failure::input)?.ip().to_canonical())
}

fn this_version() -> Version {
    Version { version: VERSION, release: env!("CARGO_PKG_VERSION").to_owned(), unable: None }
}

fn say(conversation: &mut Conversation, word: &impl Serialize) -> Result<(), PeerError> {
    // Plain data: it can always be written.
    let message = serde_json::to_vec(word).unwrap_or_default();
    conversation.send(&message, Instant::now() + PATIENCE)
}

fn hear(conversation: &mut Conversation, patience: Duration) -> Result<Vec<u8>, PeerError> {
    conversation.receive(LONGEST, Instant::now() + patience)
}

fn read<T: DeserializeOwned>(message: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(message).map_err(|_| nonsense())
}

fn nonsense() -> Failure {
    let release = env!("CARGO_PKG_VERSION");
    Failure::input(format!(
        "the other end says what this one ({release}) cannot read: use the same release on both hosts"
    ))
}

/// What the other end has, if it can be tested.
fn other_side(message: &[u8]) -> Result<Side, Failure> {
    let Version { version, release, unable } = read(message)?;
    if let Some(why) = unable {
        let why = show::plain(&why);
        return Err(Failure::input(format!("the other end cannot test the link: {why}")));
    }
    if version != VERSION {
        let ours = this_version();
        return Err(Failure::input(format!(
            "the other end tests links as version {version} (kvferry {}), this one as version {VERSION} (kvferry {}): use the \
             same release on both hosts",
            release.escape_debug(),
            ours.release
        )));
    }
    read(message)
}
