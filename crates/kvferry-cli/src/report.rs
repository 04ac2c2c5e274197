//! What a pair of engines would move for one request.

use std::collections::HashMap;

use kvferry_layout::{Manifest, Phase, StateBox};
use kvferry_plan::{Plan, Request, Spread, Summary};
use serde::Serialize;

use crate::failure::Failure;
use crate::sides::{Asked, Engine, Pair};
use crate::tables::{self, TooFew};
use crate::text::{self, Columns};

/// Whether a pair fits.
pub(crate) enum Answer {
    /// It does: the plans of all decode ranks, and what they move.
    Works { plans: Vec<Plan>, report: Report },
    /// It does not, for this reason.
    Refused(String),
}

impl Answer {
    /// Compiles the plans of a pair and counts what they move. Input that cannot be answered for is a
    /// failure.
    pub(crate) fn of(pair: &Pair) -> Result<Self, Failure> {
        let (prefill, decode) = (&pair.prefill.ranks, &pair.decode.ranks);
        let sources: Vec<&Manifest> = prefill.iter().collect();
        let mut plans = vec![];
        for rank in decode {
            match Plan::compile_spread(rank, &sources, Spread::among(decode.len() as u32)) {
                Ok(plan) => plans.push(plan),
                Err(reason) => {
                    return Ok(Self::Refused(format!("decode rank {}: {reason}", rank.label())));
                }
            }
        }
        let report = report(pair, &plans)?;
        Ok(Self::Works { plans, report })
    }

    /// The way the command ends.
    pub(crate) fn end(self) -> Result<(), Failure> {
        match self {
            Self::Works { .. } => Ok(()),
            Self::Refused(reason) => Err(Failure::Refused(reason)),
        }
    }
}

/// What one decode rank reads from one prefill rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) decode: String,
    pub(crate) prefill: String,
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) shortest: u64,
    pub(crate) longest: u64,
    pub(crate) mean: f64,
}

/// What the whole request moves.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    pub(crate) pairs: Vec<Row>,
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) shortest: u64,
    pub(crate) longest: u64,
    pub(crate) mean: f64,
    /// Every live byte of the model's memory that is missing, once.
    pub(crate) minimum: u64,
}

/// Tokens that every group of a rank holds already. A state of a fixed size is held only when nothing
/// is missing.
fn cached(rank: &Manifest, asked: &Asked) -> Vec<u64> {
    let held = |group: &kvferry_layout::Group| match group.tokens_per_block {
        None if asked.cached < asked.tokens => 0,
        _ => asked.cached,
    };
    rank.groups().iter().map(held).collect()
}

/// Calls `then` with every decode rank, its plan and the request as that rank sees it.
pub(crate) fn each_request(
    pair: &Pair,
    plans: &[Plan],
    mut then: impl FnMut(&Manifest, &Plan, &Request<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let asked = &pair.asked;
    let tables = |name: &str, engine: &Engine| {
        tables::for_request(&engine.ranks[0], asked.tokens, asked.spread).map_err(
            |TooFew { needed, blocks }| {
                Failure::input(format!(
                    "the request needs {needed} blocks, but the {name} engine has {blocks}: ask for \
                     fewer --tokens, or give it more blocks"
                ))
            },
        )
    };
    let (from, to) = (tables("prefill", &pair.prefill)?, tables("decode", &pair.decode)?);
    let (from, to) = (tables::borrowed(&from), tables::borrowed(&to));
    for (rank, plan) in pair.decode.ranks.iter().zip(plans) {
        let cached = cached(rank, asked);
        let request =
            Request { tokens: asked.tokens, cached: &cached, source: &from, destination: &to };
        then(rank, plan, &request)?;
    }
    Ok(())
}

/// What the request moves between all ranks of two engines.
fn report(pair: &Pair, plans: &[Plan]) -> Result<Report, Failure> {
    let (prefill, decode, asked) = (&pair.prefill.ranks, &pair.decode.ranks, &pair.asked);
    let mut pairs = vec![];
    let mut total = Summary::default();
    each_request(pair, plans, |rank, plan, request| {
        let transfer = plan.transfer(request).map_err(Failure::input)?;
        for (source, other) in prefill.iter().enumerate() {
            let part = transfer.summary(source).map_err(Failure::input)?;
            if part.copies == 0 {
                continue;
            }
            total.shortest = match total.copies {
                0 => part.shortest,
                _ => total.shortest.min(part.shortest),
            };
            total.longest = total.longest.max(part.longest);
            total.copies += part.copies;
            total.bytes += part.bytes;
            pairs.push(Row {
                decode: rank.label().to_owned(),
                prefill: other.label().to_owned(),
                bytes: part.bytes,
                copies: part.copies,
                shortest: part.shortest,
                longest: part.longest,
                mean: part.mean(),
            });
        }
        Ok(())
    })?;
    Ok(Report {
        pairs,
        bytes: total.bytes,
        copies: total.copies,
        shortest: total.shortest,
        longest: total.longest,
        mean: total.mean(),
        minimum: minimum(decode, asked),
    })
}

/// Bytes that must move to the decode side, whatever its ranks replicate: every live byte once.
fn minimum(decode: &[Manifest], asked: &Asked) -> u64 {
    // For every state: the boxes that are counted already, by the entries that they cover.
    let mut counted: HashMap<(&str, Phase), Vec<StateBox>> = HashMap::new();
    let mut bytes = 0;
    for rank in decode {
        let cached = cached(rank, asked);
        for (group, &held) in rank.groups().iter().zip(&cached) {
            for piece in &group.pieces {
                let kind = rank.kind(piece);
                let known = counted.entry((piece.state.as_str(), piece.phase)).or_default();
                let mut new = vec![piece.bounds.clone()];
                for other in known.iter() {
                    let mut rest = vec![];
                    new.iter().for_each(|part| part.subtract(other, &mut rest));
                    new = rest;
                }
                let all = kind.law.entries(asked.tokens);
                let first = kind.law.closed(group.window.first_live(asked.tokens));
                let first = first.max(kind.law.held(held, asked.tokens)).min(all);
                let entries = piece.phase.local(all) - piece.phase.local(first);
                let volume: u64 = new.iter().map(StateBox::volume).sum();
                bytes += entries * volume * u64::from(kind.format.bytes);
                known.extend(new);
            }
        }
    }
    bytes
}

impl Report {
    /// The table of rank pairs, with totals.
    pub(crate) fn table(&self) -> String {
        let heading = ["decode", "prefill", ">bytes", ">copies", ">shortest", ">mean", ">longest"];
        let mut columns = Columns::new(&heading);
        for row in &self.pairs {
            columns.row([
                row.decode.clone(),
                row.prefill.clone(),
                text::bytes(row.bytes),
                text::number(row.copies),
                text::bytes(row.shortest),
                text::bytes(row.mean.round() as u64),
                text::bytes(row.longest),
            ]);
        }
        columns.rule();
        columns.row([
            "all".to_owned(),
            String::new(),
            text::bytes(self.bytes),
            text::number(self.copies),
            text::bytes(self.shortest),
            text::bytes(self.mean.round() as u64),
            text::bytes(self.longest),
        ]);
        columns.render()
    }

    /// The moved bytes against the least that must move.
    pub(crate) fn against_minimum(&self) -> String {
        let (moved, least) = (text::bytes(self.bytes), text::bytes(self.minimum));
        if self.bytes == self.minimum {
            return format!("{moved}: every byte once, the least that must move");
        }
        let ratio = self.bytes as f64 / self.minimum.max(1) as f64;
        let more = match ratio < 1.01 {
            true => format!("{} more than", text::bytes(self.bytes - self.minimum)),
            false => format!("{ratio:.2} times"),
        };
        format!("{moved}: {more} the {least} that must move, since decode ranks hold replicas")
    }
}
