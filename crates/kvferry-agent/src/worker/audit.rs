//! Compares what has landed with what the source's ranks hold.
//!
//! Every piece of this rank is compared as a whole: its digest by this rank's own manifest and tables,
//! against the sum of the digests of all parts of it, each computed by the rank that it was read from,
//! by that rank's own manifest and the tables that its scheduler granted. So whatever lies between the
//! two is checked: the copies, the plan, the transport, both memories.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_digest::{Digest, Held, Key, Part, Program};
use kvferry_layout::{Manifest, Piece, Span};
use kvferry_plan::{BlockTable, Plan};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{debug, error, info, warn};

use super::core::Core;
use super::load::Load;
use super::source_engine::SourceEngine;
use crate::panics::broken;
use crate::rules::audit::PATIENCE;
use crate::rules::failure::Failure;
use crate::rules::grant::Fingerprint;
use crate::rules::lease::Loss;
use crate::wire::link::Links;
use crate::wire::message::{Question, Reply};
use crate::wire::task::{Task, TaskReply};
use crate::wire::ticket::Ticket;

/// So long may it take, and half of the time that is left of the load's.
const LONGEST: Duration = Duration::from_secs(10);

/// What came of an audit.
#[derive(Debug)]
pub(super) enum Audited {
    /// What is here is what was meant, or was not looked at.
    Passed,
    /// The lease was lost meanwhile.
    NotHeld(Loss),
    Failed(Failure),
}

/// Audits a load whose bytes are all here, if it is due.
pub(super) async fn audit(
    core: Arc<Core>,
    load: Arc<Load>,
    engine: Arc<SourceEngine>,
    read_by: Fingerprint,
    deadline: Instant,
) -> Audited {
    if core.peers.introduced.knows(&load.ticket.address) {
        return Audited::Passed;
    }
    // Without a random number nothing can be sampled; then it is due.
    let dice = getrandom::u64().unwrap_or(0);
    if !engine.trial.lock().due(core.audit, dice) {
        return Audited::Passed;
    }
    let compared = compare(&core, &load, &engine, read_by, deadline).await;
    let (from, metrics) = (&load.ticket.engine, &core.metrics);
    match compared {
        Ok(bytes) => {
            metrics.audits_matched.add(1);
            metrics.audited_bytes.add(bytes);
            if engine.trial.lock().matched() {
                info!(
                    from,
                    bytes,
                    "verified: what landed here has the same digest as what the source holds"
                );
            }
            Audited::Passed
        }
        Err(Trouble::Unable(reason)) => {
            metrics.audits_unable.add(1);
            if engine.trial.lock().unable() {
                warn!(
                    from,
                    reason,
                    "what is read from this engine cannot be audited; it is used all the same"
                );
            }
            Audited::Passed
        }
        Err(Trouble::Mismatch(Mismatch { state, source_rank, side })) => {
            metrics.audits_mismatched.add(1);
            let rank = core.peers.rank.number;
            error!(
                from,
                state,
                source_rank,
                rank,
                side,
                "other bytes have landed than the source holds: the load fails"
            );
            let what = format!("{state}, read from rank {source_rank} ({side})");
            if engine.trial.lock().mismatched(&what) {
                error!(
                    from,
                    "{PATIENCE} audits have failed: nothing is read from this engine any more"
                );
            }
            Audited::Failed(Failure::Mismatch(what))
        }
        Err(Trouble::NotHeld(loss)) => Audited::NotHeld(loss),
        Err(Trouble::Failed(failure)) => Audited::Failed(failure),
    }
}

/// Why two sides could not be shown to be equal.
#[derive(Debug)]
enum Trouble {
    Mismatch(Mismatch),
    /// One of the two cannot compute digests, or not in time, and why.
    Unable(String),
    NotHeld(Loss),
    Failed(Failure),
}

/// Where two sides differ.
#[derive(Debug)]
struct Mismatch {
    state: String,
    /// The ranks that it was read from.
    source_rank: String,
    /// On which side to look.
    side: &'static str,
}

/// What is compared with what.
struct Comparison {
    /// This rank's pieces: group, index, and the entries that were read.
    pieces: Vec<((usize, usize), Span)>,
    /// For every source: the parts that were read from it, and the piece that each belongs to.
    parts: Vec<(Vec<usize>, Vec<Part>)>,
}

/// Bytes that were compared.
async fn compare(
    core: &Arc<Core>,
    load: &Arc<Load>,
    engine: &Arc<SourceEngine>,
    read_by: Fingerprint,
    deadline: Instant,
) -> Result<u64, Trouble> {
    let random = getrandom::u64().and_then(|a| Ok(Key([a, getrandom::u64()?])));
    let key = random.map_err(|error| Trouble::Unable(error.to_string()))?;
    let comparison = Arc::new(Comparison::new(&engine.plan, &core.peers.rank.manifest, load));
    if comparison.pieces.is_empty() {
        return Ok(0);
    }
    // To look again takes time, and so does the confirmation: what is slow is not wrong, and fails no load.
    let began = Instant::now();
    let limit = began + (deadline.saturating_duration_since(began) / 2).min(LONGEST);
    let first = both(core, load, engine, &comparison, (key, read_by), limit).await;
    if matches!(first, Err(Trouble::Failed(_))) && Instant::now() >= limit {
        let seconds = (limit - began).as_secs_f64();
        let reason = format!("it is not done after {seconds:.1} s");
        return Err(Trouble::Unable(reason));
    }
    let (first, bytes) = first?;
    let Some(piece) = first.differing() else { return Ok(bytes) };
    // Once more, to see which side does not keep still.
    let side = match both(core, load, engine, &comparison, (key, read_by), deadline).await {
        Ok((again, _)) if again.expected != first.expected => "the source's memory is changing",
        Ok((again, _)) if again.own != first.own => "this side's memory is changing",
        Ok(_) => "both sides keep still: it went wrong on the way",
        Err(_) => "the source did not answer a second time",
    };
    let (group, index) = comparison.pieces[piece].0;
    let state = core.peers.rank.manifest.groups()[group].pieces[index].state.clone();
    let source_rank = culprits(core, load, engine, &comparison, key, piece, &first).await;
    Err(Trouble::Mismatch(Mismatch { state, source_rank, side }))
}

/// The digests of both sides.
struct Both {
    /// Of this rank's pieces.
    own: Vec<Digest>,
    /// The same, as the sources have them.
    expected: Vec<Digest>,
    /// For every source, of the parts read from it.
    by_source: Vec<Vec<Digest>>,
}

impl Both {
    /// The first piece that differs.
    fn differing(&self) -> Option<usize> {
        (0..self.own.len()).find(|&piece| self.own[piece] != self.expected[piece])
    }
}

/// Asks all sources at once, and looks at this side meanwhile.
async fn both(
    core: &Arc<Core>,
    load: &Arc<Load>,
    engine: &Arc<SourceEngine>,
    comparison: &Arc<Comparison>,
    (key, read_by): (Key, Fingerprint),
    deadline: Instant,
) -> Result<(Both, u64), Trouble> {
    let mut asked = JoinSet::new();
    for (index, (_, parts)) in comparison.parts.iter().enumerate() {
        if !parts.is_empty() {
            let (core, load, rank) = (core.clone(), load.clone(), engine.ranks[index]);
            let task = Task::Digest { key, parts: parts.clone() };
            asked.spawn(async move {
                let asking = Asking { ticket: &load.ticket, read_by, rank, deadline };
                asking.ask(&core.peers.audits, task).await.map(|digests| (index, digests))
            });
        }
    }
    let own = {
        let (core, load, comparison) = (core.clone(), load.clone(), comparison.clone());
        tokio::task::spawn_blocking(move || own_digests(&core, &load, &comparison, key, deadline))
    };
    let mut by_source = vec![vec![]; comparison.parts.len()];
    let mut expected = vec![Digest::default(); comparison.pieces.len()];
    while let Some(answer) = asked.join_next().await {
        let broke_off = || Trouble::Failed(Failure::PeerGone("the audit broke off".to_owned()));
        let (index, digests) = answer.map_err(|_| broke_off())??;
        let (pieces, _) = &comparison.parts[index];
        if digests.len() != pieces.len() {
            let answer = format!("rank {} answers for other parts", engine.ranks[index]);
            return Err(Trouble::Failed(Failure::PeerMisbehaved(answer)));
        }
        for (piece, digest) in pieces.iter().zip(&digests) {
            expected[*piece] += *digest;
        }
        by_source[index] = digests;
    }
    let own = own.await.map_err(|_| Trouble::Failed(broken("looking at the memory")));
    let (own, bytes) = own??;
    Ok((Both { own, expected, by_source }, bytes))
}

/// The digests of this rank's pieces, and their bytes.
fn own_digests(
    core: &Core,
    load: &Load,
    comparison: &Comparison,
    key: Key,
    deadline: Instant,
) -> Result<(Vec<Digest>, u64), Trouble> {
    let rank = &core.peers.rank;
    let tables = tables(&load.destination);
    let held = Held { manifest: &rank.manifest, tokens: load.tokens, tables: &tables };
    let program = Program::of_pieces(held, &key, &comparison.pieces);
    let program = program.map_err(|error| {
        Trouble::Failed(Failure::Mismatch(format!("{error}, although it was read")))
    })?;
    match rank.carrier.digest(&program, deadline) {
        Ok(digests) => Ok((digests, program.bytes())),
        Err(error @ kvferry_transport::Error::Unsupported(_)) => {
            Err(Trouble::Unable(format!("on this side: {error}")))
        }
        Err(error) => Err(Trouble::Failed(Failure::Transport(error.to_string()))),
    }
}

/// The ranks whose parts of a piece are not what has landed of them.
async fn culprits(
    core: &Arc<Core>,
    load: &Arc<Load>,
    engine: &SourceEngine,
    comparison: &Arc<Comparison>,
    key: Key,
    piece: usize,
    found: &Both,
) -> String {
    let mut parts: BTreeMap<u32, Vec<(Part, Digest)>> = BTreeMap::new();
    for (index, (pieces, all)) in comparison.parts.iter().enumerate() {
        let of_piece = pieces.iter().zip(all).zip(&found.by_source[index]);
        let of_piece = of_piece.filter(|((of, _), _)| **of == piece);
        let of_piece = of_piece.map(|((_, part), digest)| (part.clone(), *digest));
        parts.entry(engine.ranks[index]).or_default().extend(of_piece);
    }
    parts.retain(|_, parts| !parts.is_empty());
    let all: Vec<String> = parts.keys().map(ToString::to_string).collect();
    let (core, load) = (core.clone(), load.clone());
    let looked = tokio::task::spawn_blocking(move || {
        let tables = tables(&load.destination);
        let rank = &core.peers.rank;
        let held = Held { manifest: &rank.manifest, tokens: load.tokens, tables: &tables };
        let differs = |parts: &[(Part, Digest)]| {
            let asked: Vec<Part> = parts.iter().map(|(part, _)| part.clone()).collect();
            let program = Program::new(held, &key, &asked).ok()?;
            let soon = Instant::now() + Duration::from_secs(10);
            let here = rank.carrier.digest(&program, soon).ok()?;
            Some(here.iter().zip(parts).any(|(here, (_, there))| here != there))
        };
        let wrong = parts.iter().filter(|(_, parts)| differs(parts) == Some(true));
        wrong.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>()
    });
    match looked.await {
        Ok(wrong) if !wrong.is_empty() => wrong.join(", "),
        // All parts are right, and still the whole is not: the plan left something out.
        _ => all.join(", "),
    }
}

fn tables(tables: &[BlockTable]) -> Vec<(u64, &[u32])> {
    tables.iter().map(|table| (table.first, &table.blocks[..])).collect()
}

impl Comparison {
    fn new(plan: &Plan, manifest: &Manifest, load: &Load) -> Self {
        let mut pieces = vec![];
        let mut numbers = BTreeMap::new();
        for (group, facts) in manifest.groups().iter().enumerate() {
            let Some(&cached) = load.cached.get(group) else { continue };
            for (index, piece) in facts.pieces.iter().enumerate() {
                let law = manifest.kind(piece).law;
                let window = match plan.windowed().contains(&(group, index)) {
                    true => facts.need(piece),
                    false => facts.window,
                };
                let live = law.closed(window.first_live(load.tokens));
                let entries =
                    Span::from(law.held(cached, load.tokens).max(live)..law.entries(load.tokens));
                if !entries.is_empty() {
                    numbers.insert((group, index), pieces.len());
                    pieces.push(((group, index), entries));
                }
            }
        }
        let mut parts = vec![(vec![], vec![]); plan.source_count()];
        for part in plan.parts() {
            let Some(&number) = numbers.get(&part.to) else { continue };
            let Piece { state, .. } = &manifest.groups()[part.to.0].pieces[part.to.1];
            let (of, asked) = &mut parts[part.source];
            of.push(number);
            asked.push(Part {
                state: state.clone(),
                bounds: part.bounds.clone(),
                phase: part.phase,
                entries: pieces[number].1,
            });
        }
        Self { pieces, parts }
    }
}

/// A task for a rank of the source.
struct Asking<'a> {
    ticket: &'a Ticket,
    read_by: Fingerprint,
    rank: u32,
    deadline: Instant,
}

impl Asking<'_> {
    /// Asks until there is an answer. The deadline is the caller's.
    async fn ask(&self, links: &Links, task: Task) -> Result<Vec<Digest>, Trouble> {
        let gone = |reason: String| {
            let failure = Failure::PeerGone(format!("rank {}: {reason}", self.rank));
            Trouble::Failed(failure)
        };
        loop {
            // It is this side that gives up first: what the other says then is no answer.
            let left =
                self.deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
            let asked = async {
                let link = links.get(&self.ticket.address, self.deadline.into()).await?;
                let question = Question::Ask {
                    incarnation: self.ticket.incarnation,
                    key: self.ticket.key(),
                    read_by: self.read_by,
                    rank: self.rank,
                    patience_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
                    task: task.clone(),
                };
                link.ask(question, self.deadline.into()).await
            };
            let reply = match asked.await {
                Ok(Reply::Task(reply)) => reply,
                Ok(_) => return Err(gone("an answer that does not fit".to_owned())),
                Err(error) => {
                    debug!(%error, "the audit was not answered: asking again");
                    if Instant::now() >= self.deadline {
                        return Err(gone(error.to_string()));
                    }
                    sleep(Duration::from_millis(10)).await;
                    continue;
                }
            };
            return match reply {
                TaskReply::Digests(digests) => Ok(digests),
                TaskReply::NotHeld(loss) => Err(Trouble::NotHeld(loss)),
                // By its own manifest it does not have what was read from it by its card.
                TaskReply::Refused(reason) => Err(Trouble::Failed(Failure::Mismatch(format!(
                    "rank {} does not know what was read from it: {reason}",
                    self.rank
                )))),
                TaskReply::Unable(reason) => Err(Trouble::Unable(reason)),
                TaskReply::Gone(reason) => Err(gone(reason)),
                TaskReply::Written { .. } => Err(gone("an answer that does not fit".to_owned())),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_testkit::drive::{Drawn, compile};
    use kvferry_testkit::random::Dice;
    use kvferry_testkit::request::{Shape, draw};

    use super::*;
    use crate::rules::grant::Grant;
    use crate::wire::ticket::Incarnation;

    fn load(tokens: u64, cached: Vec<u64>) -> Load {
        Load {
            request: "r".to_owned(),
            ticket: Ticket {
                engine: "p".to_owned(),
                address: String::new(),
                incarnation: Incarnation(1),
                request: "r".to_owned(),
                nonce: 1,
                term_ms: 1000,
            },
            grant: Some(Grant::default()),
            origin: None,
            tokens,
            cached,
            destination: vec![],
            patience: Duration::from_secs(1),
            deadline: Duration::from_secs(1),
            rest: false,
        }
    }

    /// What is compared is what the judge says that must arrive, and the parts make up all of it.
    #[test]
    fn everything_that_is_needed_is_compared_once() {
        let (mut pieces, mut windowed) = (0, 0);
        for seed in 0..300 {
            let drawn = Drawn::new(seed);
            let dice = &mut Dice::new(!seed);
            let request = draw(&drawn.source, &drawn.destination, 60, Shape::Scattered, dice);
            for (number, rank) in drawn.destination.ranks.iter().enumerate() {
                let Ok(plan) = compile(&drawn.source, &drawn.sources, &drawn.destination, number)
                else {
                    continue;
                };
                windowed += plan.windowed().len();
                let load = load(request.tokens, request.cached.clone());
                let comparison = Comparison::new(&plan, &rank.manifest, &load);
                let mut needed = vec![];
                for (group, facts) in drawn.destination.recipe.groups.iter().enumerate() {
                    for (piece, holding) in rank.holdings[group].iter().enumerate() {
                        let copied = facts.copied(holding, &drawn.source);
                        let cached = request.cached[group];
                        let entries = copied.needed(holding.law, cached, request.tokens);
                        if !entries.is_empty() {
                            needed.push(((group, piece), Span::from(entries)));
                        }
                    }
                }
                assert_eq!(comparison.pieces, needed, "seed {seed}, rank {number}");
                pieces += needed.len();
                // Elements of one cycle of turns, piece by piece.
                for (index, ((group, piece), _)) in comparison.pieces.iter().enumerate() {
                    let whole = &rank.manifest.groups()[*group].pieces[*piece];
                    let per = |volume: u64, phase: kvferry_layout::Phase| {
                        volume as f64 * phase.held.len() as f64 / phase.modulus as f64
                    };
                    let parts =
                        comparison.parts.iter().flat_map(|(of, parts)| of.iter().zip(parts));
                    let parts = parts.filter(|(of, _)| **of == index);
                    let sum: f64 =
                        parts.map(|(_, part)| per(part.bounds.volume(), part.phase)).sum();
                    assert!((sum - per(whole.bounds.volume(), whole.phase)).abs() < 1e-6);
                }
            }
        }
        assert!(pieces > 500 && windowed > 0, "{pieces} {windowed}");
    }
}
