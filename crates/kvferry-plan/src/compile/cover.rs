//! Which source rank each part of the destination comes from.

use std::collections::HashMap;

use kvferry_layout::arithmetic::lcm;
use kvferry_layout::{Format, Manifest, Phase, Piece, Span, StateBox, Window, Writer};

use crate::incompatible::Incompatible;

/// One part of a destination piece, and the source piece that it is read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of the source rank.
    pub source: usize,
    /// Group and piece on the source.
    pub from: (usize, usize),
    /// Group and piece on the destination.
    pub to: (usize, usize),
    /// Which part of every entry, in the state's coordinates.
    pub bounds: StateBox,
    /// Which of the entries.
    pub phase: Phase,
}

/// The longest repetition of turns (see [`Phase`]) that is compiled.
const MAX_CYCLE: u64 = 4096;

/// Boxes held against each other in one compilation. Real pairs take thousands; a hostile or mistaken
/// one is refused when they are spent.
const MAX_STEPS: u64 = 20_000_000;

/// What is left of [`MAX_STEPS`].
pub(crate) struct Budget(u64);

impl Budget {
    pub(crate) fn new() -> Self {
        Self(MAX_STEPS)
    }

    /// Takes `steps` steps for `state`.
    pub(crate) fn spend(&mut self, steps: usize, state: &str) -> Result<(), Incompatible> {
        self.0 = self.0.checked_sub(steps as u64).ok_or_else(|| Incompatible::TooComplex {
            state: state.to_owned(),
            limit: MAX_STEPS,
        })?;
        Ok(())
    }
}

/// What [`cover`] finds.
pub(crate) struct Cover {
    pub(crate) parts: Vec<Part>,
    /// `windows[group][piece]`: the tokens of each destination piece that are copied.
    pub(crate) windows: Vec<Vec<Window>>,
}

/// A piece of the destination while it is being covered.
pub(crate) struct Wanted<'a> {
    pub(crate) state: &'a str,
    pub(crate) group: usize,
    pub(crate) piece: usize,
    /// The tokens of it that are copied.
    pub(crate) window: Window,
    /// The turns of all ranks repeat after this many entries.
    pub(crate) cycle: u64,
    /// Bytes of one element.
    weight: u128,
    /// What no source was chosen for yet. The first axis is the entry's index in the cycle.
    open: Vec<StateBox>,
    /// The source pieces that have a part of it.
    pub(crate) offers: Vec<Offer>,
    /// All source pieces of the state that would do, for this rank or for another of its engine: source
    /// rank, box and turns.
    pub(crate) held: Vec<(usize, &'a StateBox, Phase)>,
    /// The refusal of a source that has the state but does not keep all tokens that are needed.
    forgetful: Option<Incompatible>,
}

impl Wanted<'_> {
    /// The part that `offer` gives of this piece: `bounds`, whose first axis is the entry's index in the
    /// cycle.
    pub(crate) fn part(&self, offer: &Offer, bounds: &StateBox) -> Part {
        let turns = bounds.0[0];
        let all = turns.len() == self.cycle;
        Part {
            source: offer.source,
            from: (offer.group, offer.piece),
            to: (self.group, self.piece),
            bounds: StateBox(bounds.0[1..].to_vec()),
            phase: if all { Phase::ALL } else { Phase { modulus: self.cycle, held: turns } },
        }
    }
}

/// A piece of a source that has a part of a wanted one.
pub(crate) struct Offer {
    pub(crate) source: usize,
    pub(crate) group: usize,
    pub(crate) piece: usize,
    /// The first axis is the entry's index in the cycle.
    pub(crate) boxes: Vec<StateBox>,
}

/// Chooses, for every piece of the destination, source pieces that hold all of it.
///
/// Source ranks are taken greedily: always the one that has most of what is still open, so that few
/// are read. Among equals the destination's rank number decides, so that the ranks of an engine spread
/// over replicas; the engine's name shifts the start, so that engines of one rank each do, too. What
/// is worth reading from more ranks than that is spread afterwards, for which the wanted pieces are
/// handed back.
pub(crate) fn cover<'a>(
    destination: &'a Manifest,
    sources: &[&'a Manifest],
    budget: &mut Budget,
) -> Result<(Cover, Vec<Wanted<'a>>), Incompatible> {
    let mut wanted = wanted(destination, sources, budget)?;
    let mut weights = vec![0u128; sources.len()];
    for want in &wanted {
        for offer in &want.offers {
            budget.spend(want.open.len() * offer.boxes.len(), want.state)?;
            let shared = offer.boxes.iter().map(|held| shared_volume(&want.open, held));
            weights[offer.source] += want.weight * shared.sum::<u128>();
        }
    }
    let mut parts = vec![];
    while let Some(most) = weights.iter().copied().max().filter(|&most| most > 0) {
        let mut equals: Vec<usize> = (0..sources.len()).filter(|&s| weights[s] == most).collect();
        // By their own numbers: whoever handed the manifests in may have done so in any order.
        equals.sort_by_key(|&source| sources[source].rank());
        let chosen = equals[(turn(destination) % equals.len() as u64) as usize];
        for want in &mut wanted {
            take(want, chosen, &mut weights, &mut parts, budget)?;
        }
        debug_assert_eq!(weights[chosen], 0, "a chosen source has nothing more to give");
        weights[chosen] = 0;
    }
    let mut windows = vec![vec![]; destination.groups().len()];
    for want in &mut wanted {
        windows[want.group].push(want.window);
        if let Some(open) = want.open.first() {
            if let Some(refusal) = want.forgetful.take() {
                return Err(refusal);
            }
            let state = want.state.to_owned();
            let part = StateBox(open.0[1..].to_vec());
            let phase = Phase { modulus: want.cycle, held: open.0[0] };
            return Err(Incompatible::Uncovered { state, part, phase });
        }
    }
    Ok((Cover { parts, windows }, wanted))
}

/// Moves what `chosen` offers of a wanted piece from its open boxes to `parts`.
fn take(
    want: &mut Wanted<'_>,
    chosen: usize,
    weights: &mut [u128],
    parts: &mut Vec<Part>,
    budget: &mut Budget,
) -> Result<(), Incompatible> {
    budget.spend(want.offers.len(), want.state)?;
    for index in 0..want.offers.len() {
        if want.offers[index].source != chosen {
            continue;
        }
        for number in 0..want.offers[index].boxes.len() {
            let offer = &want.offers[index];
            let held = &offer.boxes[number];
            budget.spend(want.open.len(), want.state)?;
            let mut left = Vec::with_capacity(want.open.len());
            for open in std::mem::take(&mut want.open) {
                let Some(both) = open.intersect(held) else {
                    left.push(open);
                    continue;
                };
                open.subtract(held, &mut left);
                for other in &want.offers {
                    budget.spend(other.boxes.len(), want.state)?;
                    let lost: u128 = other.boxes.iter().map(|held| common(&both, held)).sum();
                    weights[other.source] -= want.weight * lost;
                }
                parts.push(want.part(offer, &both));
            }
            want.open = left;
        }
    }
    Ok(())
}

/// No source has the state of a piece: what they have of the same layer that the destination has not.
fn missing(destination: &Manifest, piece: &Piece, sources: &[&Manifest]) -> Incompatible {
    fn pieces(manifest: &Manifest) -> impl Iterator<Item = &Piece> {
        manifest.groups().iter().flat_map(|group| &group.pieces)
    }
    let mut instead: Vec<(String, Format)> = vec![];
    for source in sources {
        for other in pieces(source).filter(|it| it.layer() == piece.layer()) {
            let known = instead.iter().any(|(state, _)| *state == other.state);
            if !known && pieces(destination).all(|own| own.state != other.state) {
                instead.push((other.state.clone(), source.kind(other).format.clone()));
            }
        }
    }
    Incompatible::Missing {
        state: piece.state.clone(),
        format: destination.kind(piece).format.clone(),
        sources: sources.len(),
        instead,
    }
}

/// The pieces of the destination, each with the source pieces that have a part of it and fit.
fn wanted<'a>(
    destination: &'a Manifest,
    sources: &[&'a Manifest],
    budget: &mut Budget,
) -> Result<Vec<Wanted<'a>>, Incompatible> {
    let mut holders: HashMap<&str, Vec<(usize, usize, usize)>> = HashMap::new();
    for (source, manifest) in sources.iter().enumerate() {
        for (group, facts) in manifest.groups().iter().enumerate() {
            for (number, piece) in facts.pieces.iter().enumerate() {
                holders.entry(&piece.state).or_default().push((source, group, number));
            }
        }
    }
    let mut wanted = vec![];
    for (group, facts) in destination.groups().iter().enumerate() {
        for (number, piece) in facts.pieces.iter().enumerate() {
            let state = || piece.state.clone();
            let kind = destination.kind(piece);
            let Some(holders) = holders.get(piece.state.as_str()) else {
                return Err(missing(destination, piece, sources));
            };
            budget.spend(holders.len(), &piece.state)?;
            // Where all that have the state keep as much of it as the group does, all of that is copied:
            // then a block is whole, and may serve other requests. Else no more than the model looks at.
            let kept_by_all = |window: &Window| {
                let mut windows =
                    holders.iter().map(|held| sources[held.0].groups()[held.1].window);
                windows.all(|kept| kept.keeps(window))
            };
            let window = match piece.need {
                Some(need) if !kept_by_all(&facts.window) => need,
                _ => facts.window,
            };
            let mut cycle = period(piece.phase);
            let mut forgetful = None;
            let mut fitting = Vec::with_capacity(holders.len());
            for &(source, source_group, source_piece) in holders {
                let manifest = sources[source];
                let other = &manifest.groups()[source_group];
                let held = &other.pieces[source_piece];
                let source_rank = || rank_name(manifest);
                let source_kind = manifest.kind(held);
                if source_kind.format != kind.format {
                    return Err(Incompatible::Format {
                        state: state(),
                        source_rank: source_rank(),
                        source_format: source_kind.format.clone(),
                        destination_format: kind.format.clone(),
                    });
                }
                let (writes, wrote) = (destination.writer(piece), manifest.writer(held));
                if !Writer::agree(writes, wrote) {
                    return Err(Incompatible::Writer {
                        state: state(),
                        format: kind.format.clone(),
                        source_rank: source_rank(),
                        source_writer: wrote.cloned().map(Box::new),
                        destination_writer: writes.cloned().map(Box::new),
                    });
                }
                if source_kind.axes != kind.axes {
                    return Err(Incompatible::Axes {
                        state: state(),
                        source_rank: source_rank(),
                        source_axes: source_kind.axes.clone(),
                        destination_axes: kind.axes.clone(),
                    });
                }
                if source_kind.law != kind.law {
                    return Err(Incompatible::Law {
                        state: state(),
                        source_rank: source_rank(),
                        source_law: source_kind.law,
                        destination_law: kind.law,
                    });
                }
                // Where tokens add no entries there is nothing for a window to drop.
                if kind.law.entries > 0 && !other.window.keeps(&window) {
                    forgetful = Some(Incompatible::Window {
                        state: state(),
                        source_rank: source_rank(),
                        kept: other.window,
                        needed: window,
                    });
                    continue;
                }
                fitting.push((source, source_group, source_piece, held));
                cycle = lcm(cycle, period(held.phase))
                    .filter(|&cycle| cycle <= MAX_CYCLE)
                    .ok_or_else(|| Incompatible::Phase {
                        state: state(),
                        destination_phase: piece.phase,
                        limit: MAX_CYCLE,
                    })?;
            }
            if cycle > MAX_CYCLE {
                return Err(Incompatible::Phase {
                    state: state(),
                    destination_phase: piece.phase,
                    limit: MAX_CYCLE,
                });
            }
            let open = in_cycle(&piece.bounds, piece.phase, cycle);
            let held = fitting.iter().map(|&(source, .., held)| (source, &held.bounds, held.phase));
            let held = held.collect();
            let offers = fitting
                .into_iter()
                .filter(|(.., held)| piece.bounds.intersect(&held.bounds).is_some());
            let offers = offers.map(|(source, group, number, held)| Offer {
                source,
                group,
                piece: number,
                boxes: in_cycle(&held.bounds, held.phase, cycle),
            });
            wanted.push(Wanted {
                state: &piece.state,
                group,
                piece: number,
                window,
                cycle,
                weight: u128::from(kind.format.bytes),
                open,
                offers: offers.collect(),
                held,
                forgetful,
            });
        }
    }
    Ok(wanted)
}

/// A box with one more axis in front: the entry's index in a cycle of turns.
pub(crate) fn in_cycle(bounds: &StateBox, phase: Phase, cycle: u64) -> Vec<StateBox> {
    let with_turns = |turns: Span| {
        let mut spans = Vec::with_capacity(bounds.0.len() + 1);
        spans.push(turns);
        spans.extend_from_slice(&bounds.0);
        StateBox(spans)
    };
    if phase.is_all() {
        return vec![with_turns((0..cycle).into())];
    }
    let starts = (0..cycle).step_by(phase.modulus as usize);
    let turn = |start| (start + phase.held.start..start + phase.held.end).into();
    starts.map(|start| with_turns(turn(start))).collect()
}

/// After how many entries a turn repeats.
fn period(phase: Phase) -> u64 {
    if phase.is_all() { 1 } else { phase.modulus }
}

/// What messages call a rank.
pub(crate) fn rank_name(manifest: &Manifest) -> String {
    format!("{} {}", manifest.engine(), manifest.label())
}

/// Elements that two boxes share.
pub(crate) fn common(a: &StateBox, b: &StateBox) -> u128 {
    let spans = a.0.iter().zip(&b.0);
    spans.fold(1, |volume, (a, b)| {
        volume * u128::from(a.end.min(b.end).saturating_sub(a.start.max(b.start)))
    })
}

fn shared_volume(open: &[StateBox], held: &StateBox) -> u128 {
    open.iter().map(|open| common(open, held)).sum()
}

/// Where a destination rank starts among equals.
pub(crate) fn turn(destination: &Manifest) -> u64 {
    name_hash(destination.engine()).wrapping_add(u64::from(destination.rank()))
}

/// FNV-1a: any fixed function of the name will do.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
