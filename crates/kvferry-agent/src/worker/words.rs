//! What the ranks of an engine say of the steps that they compute, while a request is read from them: which
//! states they have written. A layer can be read when all that it is read from is written.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_plan::LayerPlan;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{Instrument, debug};

use super::peers::Peers;
use super::source_engine::SourceEngine;
use crate::rules::grant::InFlight;
use crate::wire::link::is_final;
use crate::wire::task::TaskReply;
use crate::wire::ticket::Ticket;

/// However quickly layers are written, a rank is not asked for them more often than this.
const PAUSE: Duration = Duration::from_millis(1);

/// How long to wait before a rank is asked again that could not be reached.
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// What one rank has said of a step.
#[derive(Debug)]
pub(super) struct Word {
    /// The rank, by its index in the plan.
    source: usize,
    step: u64,
    states: Vec<String>,
    /// All of them are written.
    over: bool,
}

/// What all ranks have said of the step that was spoken of last.
#[derive(Debug)]
pub(super) struct Words {
    pub(super) plan: Arc<LayerPlan>,
    steps: HashMap<u64, Said>,
}

#[derive(Debug, Default)]
struct Said {
    written: HashSet<(usize, String)>,
    over: HashSet<usize>,
}

impl Words {
    pub(super) fn new(plan: Arc<LayerPlan>) -> Self {
        Self { plan, steps: HashMap::new() }
    }

    /// Takes note of a word. Answers which step it is about, and all layers of it that are written.
    pub(super) fn hear(&mut self, word: Word) -> (u64, Vec<usize>) {
        let Word { source, step, states, over } = word;
        // Ranks may be a few steps apart.
        self.steps.retain(|other, _| other.saturating_add(16) > step);
        let said = self.steps.entry(step).or_default();
        said.written.extend(states.into_iter().map(|state| (source, state)));
        if over {
            said.over.insert(source);
        }
        let written =
            |read: &(usize, String)| said.over.contains(&read.0) || said.written.contains(read);
        let layers = self.plan.layers().iter().enumerate();
        let layers = layers.filter(|(_, layer)| layer.reads.iter().all(written));
        (step, layers.map(|(index, _)| index).collect())
    }
}

/// Asks all ranks that a plan reads what they have written, of each step in flight in turn, for as long as it
/// is polled: whoever follows the lease knows when that is of no use any more.
pub(super) async fn listen(
    peers: Arc<Peers>,
    engine: Arc<SourceEngine>,
    ticket: Ticket,
    in_flight: watch::Receiver<Vec<InFlight>>,
    tell: impl Fn(Word) + Clone + Send + 'static,
) {
    let mut all = JoinSet::new();
    let read = engine.sources.iter().zip(&engine.ranks).enumerate();
    for (source, (_, rank)) in read.filter(|(_, (source, _))| source.is_some()) {
        let (peers, ticket, in_flight) = (peers.clone(), ticket.clone(), in_flight.clone());
        let one = listen_to(peers, ticket, (source, *rank), in_flight, tell.clone());
        all.spawn(one.in_current_span());
    }
    while all.join_next().await.is_some() {}
}

async fn listen_to(
    peers: Arc<Peers>,
    ticket: Ticket,
    (source, rank): (usize, u32),
    mut in_flight: watch::Receiver<Vec<InFlight>>,
    tell: impl Fn(Word),
) {
    let mut over = 0;
    // How many states are known of which step.
    let mut known = (0, 0);
    loop {
        let next = |steps: &Vec<InFlight>| {
            let mut steps = steps.iter().map(|one| one.step);
            steps.find(|step| *step > over)
        };
        let step = {
            let Ok(steps) = in_flight.wait_for(|steps| next(steps).is_some()).await else { return };
            next(&steps)
        };
        let Some(step) = step else { return };
        if known.0 != step {
            known = (step, 0);
        }
        let asked = Instant::now();
        match peers.ask_what_is_written(&ticket, rank, step, known.1).await {
            Ok(TaskReply::Written { states, over: all }) => {
                known.1 = known.1.saturating_add(u32::try_from(states.len()).unwrap_or(u32::MAX));
                if all {
                    over = step;
                }
                if all || !states.is_empty() {
                    tell(Word { source, step, states, over: all });
                }
            }
            // It may come back, and what is complete is read meanwhile.
            Ok(reply @ TaskReply::Gone(_)) => {
                debug!(rank, ?reply, "does not say what it has written");
                sleep(LONG_PAUSE).await;
            }
            Err(error) if !is_final(&error) => {
                debug!(rank, %error, "does not say what it has written");
                sleep(LONG_PAUSE).await;
            }
            Ok(reply) => return debug!(rank, ?reply, "does not say what it has written"),
            Err(error) => return debug!(rank, %error, "does not say what it has written"),
        }
        if let Some(left) = PAUSE.checked_sub(asked.elapsed()) {
            sleep(left).await;
        }
    }
}
