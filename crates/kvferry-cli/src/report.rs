//! What a pair of engines would move for one request.

use std::collections::HashMap;

use kvferry_layout::{Manifest, Phase, StateBox};
use kvferry_plan::{Incompatible, Plan, Request, RequestError, Summary};
use serde::Serialize;

use crate::request::{Spread, Tables};
use crate::table::{self, Table};

/// A request to be moved.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Asked {
    pub(crate) tokens: u64,
    /// Tokens that the decode side holds already.
    pub(crate) cached: u64,
    #[serde(skip)]
    pub(crate) spread: Spread,
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

/// Why there is no report.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The pair does not fit.
    Incompatible { rank: String, reason: Box<Incompatible> },
    /// A pool is too small.
    TooFewBlocks { engine: String, needed: u64 },
    /// The request does not fit the pair.
    Request(RequestError),
}

/// The plans of all decode ranks.
pub(crate) fn compile(prefill: &[Manifest], decode: &[Manifest]) -> Result<Vec<Plan>, Problem> {
    let sources: Vec<&Manifest> = prefill.iter().collect();
    let plan = |rank: &Manifest| {
        Plan::compile(rank, &sources).map_err(|reason| Problem::Incompatible {
            rank: rank.label().to_owned(),
            reason: Box::new(reason),
        })
    };
    decode.iter().map(plan).collect()
}

/// Tokens that every group of a rank holds already. A state of a fixed size is held only when nothing
/// is missing.
pub(crate) fn cached(rank: &Manifest, asked: &Asked) -> Vec<u64> {
    let held = |group: &kvferry_layout::Group| match group.tokens_per_block {
        None if asked.cached < asked.tokens => 0,
        _ => asked.cached,
    };
    rank.groups().iter().map(held).collect()
}

/// What a request moves between all ranks of two engines.
pub(crate) fn report(
    prefill: &[Manifest],
    decode: &[Manifest],
    asked: &Asked,
) -> Result<Report, Problem> {
    let plans = compile(prefill, decode)?;
    let tables = |ranks: &[Manifest]| {
        Tables::new(&ranks[0], asked.tokens, asked.spread).map_err(|needed| Problem::TooFewBlocks {
            engine: ranks[0].engine().to_owned(),
            needed,
        })
    };
    let (from, to) = (tables(prefill)?, tables(decode)?);
    let mut pairs = vec![];
    let mut total = Summary::default();
    for (rank, plan) in decode.iter().zip(&plans) {
        let cached = cached(rank, asked);
        let request = Request {
            tokens: asked.tokens,
            cached: &cached,
            source: &from.tables(),
            destination: &to.tables(),
        };
        let transfer = plan.transfer(&request).map_err(Problem::Request)?;
        for (source, other) in prefill.iter().enumerate() {
            let part = transfer.summary(source);
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
    }
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
        let mut table = Table::new(&heading);
        for row in &self.pairs {
            table.row([
                row.decode.clone(),
                row.prefill.clone(),
                table::bytes(row.bytes),
                table::number(row.copies),
                table::bytes(row.shortest),
                table::bytes(row.mean.round() as u64),
                table::bytes(row.longest),
            ]);
        }
        table.rule();
        table.row([
            "all".to_owned(),
            String::new(),
            table::bytes(self.bytes),
            table::number(self.copies),
            table::bytes(self.shortest),
            table::bytes(self.mean.round() as u64),
            table::bytes(self.longest),
        ]);
        table.render()
    }

    /// The moved bytes against the least that must move.
    pub(crate) fn minimum_line(&self) -> String {
        let (moved, least) = (table::bytes(self.bytes), table::bytes(self.minimum));
        if self.bytes == self.minimum {
            return format!("moves     {moved}: every byte once, the least that must move");
        }
        let ratio = self.bytes as f64 / self.minimum.max(1) as f64;
        format!(
            "moves     {moved}: {ratio:.2} times the {least} that must move, since decode ranks hold \
             replicas"
        )
    }
}
