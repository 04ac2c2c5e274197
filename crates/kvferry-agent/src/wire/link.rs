//! Connections to other engines, as the side that asks.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvferry_transport::strangers::Mentions;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::{debug, warn};

use super::channel::{self, MAX_REPLY, Receiver, Sender, io_error};
use super::lookup::lookup;
use super::message::{
    Hello, Question, Reply, Welcome, decode, decode_opening, encode, encode_opening,
};
use super::news::{Known, News, Sought};
use super::owner;
use super::reach::Reach;
use super::ticket::Ticket;
use super::trust::Trust;
use super::version::Version;
use crate::background::after;
use crate::error::{Misbehaviour, PeerError};
use crate::rules::lease::{Answer, Loss};

/// How this side presents itself.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) who: String,
    pub(crate) trust: Trust,
    pub(crate) version: Version,
    /// Where it connects to.
    pub(crate) reach: Reach,
    /// A quiet connection is tried this often, and given up after three tries without an answer.
    pub(crate) keepalive: Duration,
}

/// One connection. Cheap to clone; it ends with its last clone.
#[derive(Clone)]
pub(crate) struct Link {
    questions: mpsc::Sender<(Question, oneshot::Sender<Result<Reply, PeerError>>)>,
    closed: Arc<AtomicBool>,
    pub(crate) welcome: Arc<Welcome>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("welcome", &self.welcome).finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) async fn open(
        address: &str,
        caller: &Caller,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        let stream = timeout_at(deadline, connect(address, &caller.reach)).await;
        let stream = stream.unwrap_or(Err(PeerError::Slow("connecting")))?;
        let greeted = timeout_at(deadline, greet(stream, address, caller)).await;
        let (sender, receiver, welcome) =
            greeted.unwrap_or(Err(PeerError::NoGreeting("nothing came in time")))?;
        let (questions, asked) = mpsc::channel(256);
        let closed = Arc::new(AtomicBool::new(false));
        let link = Self { questions, closed: closed.clone(), welcome: Arc::new(welcome) };
        let keepalive = caller.keepalive;
        tokio::spawn(async move {
            let waiting = Waiting::default();
            let error = tokio::select! {
                error = talk(sender, asked, &waiting, keepalive) => error,
                error = listen(receiver, &waiting, keepalive) => error,
            };
            closed.store(true, Ordering::Release);
            for (_, answer) in waiting.lock().drain() {
                _ = answer.send(Err(error.clone()));
            }
        });
        Ok(link)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Asks, and waits for the answer until `deadline`.
    pub(crate) async fn ask(
        &self,
        question: Question,
        deadline: Instant,
    ) -> Result<Reply, PeerError> {
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.questions.send((question, answer)).await.map_err(|_| PeerError::Closed)?;
            answered.await.unwrap_or(Err(PeerError::Closed))
        };
        timeout_at(deadline, asked).await.unwrap_or(Err(PeerError::Slow("an answer")))
    }
}

pub(super) async fn connect(address: &str, reach: &Reach) -> Result<TcpStream, PeerError> {
    let hosts = reach.choose(lookup(address).await?)?;
    let stream = TcpStream::connect(&*hosts).await.map_err(|e| io_error("connecting", &e))?;
    stream.set_nodelay(true).map_err(|e| io_error("connecting", &e))?;
    Ok(stream)
}

/// Both sides say who they are. Whoever listens there may be anybody.
pub(super) async fn greet(
    stream: TcpStream,
    address: &str,
    caller: &Caller,
) -> Result<(Sender, Receiver, Welcome), PeerError> {
    let ends = stream.local_addr().and_then(|near| Ok((near, stream.peer_addr()?)));
    let (near, far) = ends.map_err(|e| io_error("connecting", &e))?;
    let (mut sender, mut receiver) = channel::open(stream, &caller.trust, address).await?;
    let hello = Hello { who: caller.who.clone() };
    // Where that fails, what has been answered says why.
    _ = sender.send(&encode_opening(caller.version, &hello)).await;
    let answer = receiver.greeting().await?;
    let (_, welcome) = decode_opening(caller.version, &answer)?;
    // It has accepted, so that its end is somebody's.
    owner::check(&caller.trust, near, far)?;
    Ok((sender, receiver, welcome))
}

/// The questions that were not answered yet, by their number.
type Waiting = Mutex<HashMap<u32, oneshot::Sender<Result<Reply, PeerError>>>>;

async fn talk(
    mut sender: Sender,
    mut asked: mpsc::Receiver<(Question, oneshot::Sender<Result<Reply, PeerError>>)>,
    waiting: &Waiting,
    keepalive: Duration,
) -> PeerError {
    let mut number: u32 = 0;
    loop {
        let question = match timeout(keepalive, asked.recv()).await {
            Ok(Some((question, answer))) => {
                let mut waiting = waiting.lock();
                // Whoever asked and went away does not wait any more.
                waiting.retain(|_, answer| !answer.is_closed());
                waiting.insert(number, answer);
                question
            }
            Ok(None) => return PeerError::Closed,
            Err(_) => Question::Ping,
        };
        if let Err(error) = sender.send(&encode(&(number, question))).await {
            return error;
        }
        number = number.wrapping_add(1);
    }
}

async fn listen(mut receiver: Receiver, waiting: &Waiting, keepalive: Duration) -> PeerError {
    loop {
        let message = match timeout(keepalive.saturating_mul(3), receiver.receive(MAX_REPLY)).await
        {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => return error,
            Err(_) => return PeerError::Slow("an answer"),
        };
        let (number, reply): (u32, Reply) = match decode(&message) {
            Ok(answer) => answer,
            Err(error) => return error,
        };
        // None waits for pings, nor for answers that come too late.
        if let Some(answer) = waiting.lock().remove(&number) {
            _ = answer.send(Ok(reply));
        }
    }
}

/// One connection to each engine, opened when it is needed.
#[derive(Debug)]
pub(crate) struct Links {
    caller: Caller,
    dials: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Dial>>>>,
    /// Addresses that cannot be connected to, longer than they are dialled: requests come again and again.
    failed: Mutex<Mentions<String>>,
}

/// The connection to one address, or how the tries to open it went.
#[derive(Debug, Default)]
struct Dial {
    link: Option<Link>,
    failures: u32,
    not_before: Option<Instant>,
    last: Option<PeerError>,
}

/// What an engine says of a request that is followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// How far it is, whether or not that is new.
    News(News),
    /// It has not heard of the name yet.
    NotHeardOf,
    /// The lease is not held.
    Lost(Loss),
}

/// How long an answer may take that waits for something to happen, and for the connection before it.
pub(crate) const PATIENT_ANSWER: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

impl Links {
    pub(crate) fn new(caller: Caller) -> Self {
        Self { caller, dials: Mutex::default(), failed: Mutex::default() }
    }

    /// How many engines this side is connected to, or was a moment ago.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.dials.lock().keys().cloned().collect()
    }

    /// Whether there is a connection to an address, or somebody opens one.
    pub(crate) fn is_open(&self, address: &str) -> bool {
        let Some(dial) = self.dials.lock().get(address).cloned() else { return false };
        let Ok(dial) = dial.try_lock() else { return true };
        dial.link.as_ref().is_some_and(|link| !link.is_closed())
    }

    /// The connection to an address, if it is open.
    pub(crate) fn opened(&self, address: &str) -> Option<Link> {
        let dial = self.dials.lock().get(address).cloned()?;
        let link = dial.try_lock().ok()?.link.clone();
        link.filter(|link| !link.is_closed())
    }

    /// The connection to an address; opens one, with pauses between tries, until `deadline`.
    pub(crate) async fn get(&self, address: &str, deadline: Instant) -> Result<Link, PeerError> {
        let dial = {
            let mut dials = self.dials.lock();
            dials.entry(address.to_owned()).or_default().clone()
        };
        let got = timeout_at(deadline, self.get_in(&dial, address, deadline)).await;
        let got = got.unwrap_or(Err(PeerError::Slow("connecting")));
        if got.is_err() {
            self.forget_gone(address, &dial);
        }
        got
    }

    /// Whether whoever is at the address of a ticket has ever greeted, and has answered since; `None` where nobody has
    /// tried to the end. Waits for those who are just finding out.
    async fn met(&self, ticket: &Ticket) -> Option<bool> {
        let dial = self.dials.lock().get(&ticket.address).cloned()?;
        let met = match timeout_at(given_up_by(ticket), dial.lock()).await {
            Ok(dial) if dial.link.is_none() && dial.failures == 0 => None,
            Ok(dial) => Some(dial.link.is_some()),
            Err(_) => Some(false),
        };
        if met != Some(true) {
            self.forget_gone(&ticket.address, &dial);
        }
        met
    }

    /// Tells the engine of a ticket that its lease is not wanted any more. Not where nobody has ever answered: a ticket
    /// may name any address, and a request that has failed must not knock there again. `unasked` says that this side
    /// was about to connect to it anyway, and has not begun to: that is tried once, and not for long.
    pub(crate) async fn abandon(&self, ticket: &Ticket, unasked: bool) -> Result<(), PeerError> {
        let deadline = match self.met(ticket).await {
            Some(true) => given_up_by(ticket),
            None if unasked => given_up_by(ticket).min(after(PATIENT_ANSWER).into()),
            None | Some(false) => return Ok(()),
        };
        let link = self.get(&ticket.address, deadline).await?;
        let (incarnation, keys) = (ticket.incarnation, vec![ticket.key()]);
        link.ask(Question::Abandon { incarnation, keys }, deadline).await.map(|_| ())
    }

    /// Asks an engine once how far a request is. The answer may take a while.
    pub(crate) async fn follow(
        &self,
        address: &str,
        sought: Sought,
        known: Known,
    ) -> Result<(Arc<Welcome>, Told), PeerError> {
        let deadline = after(PATIENT_ANSWER).into();
        let link = self.get(address, deadline).await?;
        let told = match link.ask(Question::Follow { sought, known }, deadline).await? {
            Reply::Frontier(news) => Told::News(news),
            Reply::NotReady => Told::NotHeardOf,
            Reply::Lease(Answer::NotHeld(loss)) => Told::Lost(loss),
            Reply::Refused(reason) => return Err(PeerError::Refused(reason)),
            _ => return Err(PeerError::Misbehaved(Misbehaviour::Answer)),
        };
        Ok((link.welcome.clone(), told))
    }

    /// Ends the connection to an address, if nobody uses it.
    pub(crate) fn forget(&self, address: &str) {
        let mut dials = self.dials.lock();
        if dials.get(address).is_some_and(|dial| Arc::strong_count(dial) == 1) {
            dials.remove(address);
        }
    }

    /// A peer that is gone is forgotten, once nobody waits for it.
    fn forget_gone(&self, address: &str, dial: &Arc<tokio::sync::Mutex<Dial>>) {
        let mut dials = self.dials.lock();
        // The map, and the caller.
        if Arc::strong_count(dial) <= 2 {
            dials.remove(address);
        }
    }

    async fn get_in(
        &self,
        dial: &tokio::sync::Mutex<Dial>,
        address: &str,
        deadline: Instant,
    ) -> Result<Link, PeerError> {
        let mut dial = dial.lock().await;
        loop {
            if let Some(link) = &dial.link {
                if !link.is_closed() {
                    return Ok(link.clone());
                }
                debug!(address, "the connection has ended");
                dial.link = None;
            }
            if let (Some(not_before), Some(last)) = (dial.not_before, &dial.last) {
                let pausing = Instant::now() < not_before;
                if pausing && (not_before >= deadline || is_final(last)) {
                    return Err(last.clone());
                }
                sleep_until(not_before).await;
            }
            match Link::open(address, &self.caller, deadline).await {
                Ok(link) => {
                    *dial = Dial { link: Some(link.clone()), ..Dial::default() };
                    return Ok(link);
                }
                Err(error) => {
                    let pause = FIRST_PAUSE * 2_u32.pow(dial.failures.min(8));
                    dial.failures += 1;
                    dial.not_before = Some(Instant::now() + pause.min(LONGEST_PAUSE));
                    // A try that the deadline cuts short says less than the one before it.
                    if dial.last.is_none() || Instant::now() < deadline {
                        dial.last = Some(error.clone());
                    }
                    let now = std::time::Instant::now();
                    if let Some(left_out) = self.failed.lock().mention(address.to_owned(), now) {
                        warn!(address, %error, left_out, "cannot connect");
                    }
                    if is_final(&error) {
                        return Err(error);
                    }
                }
            }
        }
    }
}

/// Later than this a lease has expired by itself, or nobody cares.
fn given_up_by(ticket: &Ticket) -> Instant {
    after(ticket.term().min(Duration::from_secs(60))).into()
}

/// Whether trying again at once is of no use.
pub(crate) fn is_final(error: &PeerError) -> bool {
    let passing = matches!(
        error,
        PeerError::Io { .. }
            | PeerError::Slow(_)
            | PeerError::NoGreeting(_)
            | PeerError::UnknownUser(_)
            | PeerError::Closed
    );
    !passing
}
