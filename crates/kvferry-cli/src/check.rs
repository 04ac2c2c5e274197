//! `kvferry check`: the same question for the manifests of running engines.

use std::path::{Path, PathBuf};

use kvferry_layout::{MAX_JSON_BYTES, Manifest};
use serde_json::json;

use crate::failure::Failure;
use crate::output;
use crate::plan::{self, Answer};

/// Tell whether the manifests of running engines fit, and what a request would move.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Manifests of all ranks of the prefill engine.
    #[arg(required = true, value_name = "PREFILL.json")]
    prefill: Vec<PathBuf>,
    /// Manifests of the decode engine's ranks.
    #[arg(long = "with", required = true, num_args = 1.., value_name = "DECODE.json")]
    decode: Vec<PathBuf>,
    /// Tokens of the request.
    #[arg(long, default_value_t = 8192)]
    tokens: u64,
    /// Tokens of it that the decode side holds already.
    #[arg(long, default_value_t = 0)]
    cached: u64,
    /// Take both sides' blocks one after the other, the best case, instead of scattered.
    #[arg(long)]
    contiguous: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let asked = plan::asked(args.tokens, args.cached, args.contiguous)?;
    let (prefill, decode) = (engine(&args.prefill)?, engine(&args.decode)?);
    let answer = Answer::of(&prefill, &decode, &asked)?;
    let text = if args.json {
        let answer = json!({
            "prefill": labels(&prefill),
            "decode": labels(&decode),
            "tokens": asked.tokens,
            "cached": asked.cached,
            "blocks": asked.spread.word(),
            "works": answer.0.is_ok(),
            "reason": answer.0.as_ref().err(),
            "transfer": answer.0.as_ref().ok(),
        });
        format!("{answer:#}\n")
    } else {
        answer.text().trim_start().to_owned()
    };
    output::print(&text);
    answer.end()
}

fn labels(ranks: &[Manifest]) -> Vec<&str> {
    ranks.iter().map(Manifest::label).collect()
}

/// The ranks of one engine, which share their block tables.
fn engine(paths: &[PathBuf]) -> Result<Vec<Manifest>, Failure> {
    let ranks = paths.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    let tables = |rank: &Manifest| -> Vec<Option<u64>> {
        rank.groups().iter().map(|group| group.tokens_per_block).collect()
    };
    for (index, rank) in ranks.iter().enumerate() {
        if tables(rank) != tables(&ranks[0]) {
            let (one, other) = (paths[0].display(), paths[index].display());
            let problem = format!(
                "{one} and {other} do not describe ranks of one engine: their groups differ"
            );
            return Err(Failure::input(problem));
        }
        if let Some(twice) = ranks[..index].iter().position(|known| known.rank() == rank.rank()) {
            let (one, other) = (paths[twice].display(), paths[index].display());
            let problem = format!("{one} and {other} both describe rank {}", rank.rank());
            return Err(Failure::input(problem));
        }
    }
    Ok(ranks)
}

fn read(path: &Path) -> Result<Manifest, Failure> {
    let problem =
        |error: &dyn std::fmt::Display| Failure::input(format!("{}: {error}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| problem(&error))?.len();
    if size > MAX_JSON_BYTES as u64 {
        return Err(problem(&format!("{size} bytes are too many for a manifest")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| problem(&error))?;
    Manifest::from_json(&text).map_err(|error| problem(&error))
}
