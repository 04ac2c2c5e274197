//! `kvferry plan`: will a pair work, and what would it move?

use std::path::Path;

use kvferry_layout::Manifest;
use kvferry_models::rules::vllm::{self, Pools, verdict};
use kvferry_models::{ConfigError, Facts, Model, Topology, families, presets};
use serde_json::json;

use crate::failure::Failure;
use crate::output;
use crate::report::{self, Asked, Problem, Report};
use crate::request::{self, Spread};
use crate::table;

/// Tell whether a pair of engines works, how many bytes a request moves, and in how many pieces.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) pair: PairArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A model and two engines that run it.
#[derive(Debug, clap::Args)]
pub(crate) struct PairArgs {
    /// A preset (any unambiguous part of its name), or a config.json.
    #[arg(long, value_name = "NAME|FILE")]
    model: String,
    /// A draft model for speculative decoding: a preset, a config.json, or 'mtp' for the layers that
    /// the model brings along.
    #[arg(long, value_name = "NAME|FILE|mtp")]
    draft: Option<String>,
    /// Kinds of states and families of one's own, as JSON: see docs/new-model.md.
    #[arg(long, value_name = "FILE")]
    facts: Option<std::path::PathBuf>,
    /// The prefill engine: tp, pp, block, kernel, layout, conv, spec, blocks, hma, caching.
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=1")]
    prefill: String,
    /// The decode engine: tp, pp, block, kernel, layout, conv, spec, blocks, hma, caching.
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=1")]
    decode: String,
    /// Tokens of the request.
    #[arg(long, default_value_t = 8192)]
    tokens: u64,
    /// Tokens of it that the decode side holds already.
    #[arg(long, default_value_t = 0)]
    cached: u64,
    /// Take both sides' blocks one after the other, the best case, instead of scattered.
    #[arg(long)]
    contiguous: bool,
}

/// The most tokens that a made-up request may have.
const MAX_TOKENS: u64 = 1 << 28;

/// A pair whose manifests are made.
pub(crate) struct Pair {
    pub(crate) model: Model,
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) asked: Asked,
}

/// One engine of a pair.
pub(crate) struct Engine {
    pub(crate) topology: Topology,
    pub(crate) pools: Pools,
    pub(crate) ranks: Vec<Manifest>,
}

impl PairArgs {
    /// Makes the manifests of both sides.
    pub(crate) fn resolve(&self) -> Result<Pair, Failure> {
        let asked = asked(self.tokens, self.cached, self.contiguous)?;
        let facts = self.facts()?;
        let mut model = load(&self.model, &facts)?;
        match self.draft.as_deref() {
            None => {}
            Some("mtp") => {
                let name = model.name.clone();
                let missing =
                    || Failure::input(format!("{name} brings no draft layers of its own"));
                model = model.with_own_draft().ok_or_else(missing)?;
            }
            Some(draft) => model = model.with_draft(&load(draft, &facts)?),
        }
        let engine = |name: &str, text: &str| {
            let mut topology: Topology =
                text.parse().map_err(|error| Failure::input(format!("--{name}: {error}")))?;
            let problem = |error| Failure::input(format!("--{name}: {error}"));
            let mut ranks = vllm::manifests(&model, &topology, name).map_err(problem)?;
            // A pool that is not told its size is large enough.
            let needed = request::blocks_needed(&ranks[0], asked.tokens).saturating_mul(2);
            if topology.blocks.is_none() && needed > u64::from(vllm::DEFAULT_BLOCKS) {
                topology.blocks = Some(u32::try_from(needed).map_err(|_| too_long(&asked))?);
                ranks = vllm::manifests(&model, &topology, name).map_err(problem)?;
            }
            let pools = vllm::pools(&model, &topology).map_err(problem)?;
            Ok(Engine { topology, pools, ranks })
        };
        let (prefill, decode) =
            (engine("prefill", &self.prefill)?, engine("decode", &self.decode)?);
        Ok(Pair { model, prefill, decode, asked })
    }
}

impl PairArgs {
    /// What is known of models: what comes with kvferry, and what the user adds.
    fn facts(&self) -> Result<Facts, Failure> {
        let Some(path) = &self.facts else { return Ok(Facts::shipped().clone()) };
        let problem = |error: &dyn std::fmt::Display| {
            Failure::input(format!("--facts {}: {error}", path.display()))
        };
        let text = std::fs::read_to_string(path).map_err(|error| problem(&error))?;
        Facts::shipped().with(&text).map_err(|error| problem(&error))
    }
}

/// Checks what is asked for.
pub(crate) fn asked(tokens: u64, cached: u64, contiguous: bool) -> Result<Asked, Failure> {
    let spread = if contiguous { Spread::Contiguous } else { Spread::Scattered };
    let asked = Asked { tokens, cached, spread };
    if tokens > MAX_TOKENS {
        return Err(too_long(&asked));
    }
    if cached > tokens {
        let problem = format!("--cached {cached} is more than --tokens {tokens}");
        return Err(Failure::input(problem));
    }
    Ok(asked)
}

fn too_long(asked: &Asked) -> Failure {
    Failure::input(format!("--tokens {} is too long; at most {MAX_TOKENS}", asked.tokens))
}

/// Reads a model: a file where there is one, and a preset otherwise.
fn load(name: &str, facts: &Facts) -> Result<Model, Failure> {
    let path = Path::new(name);
    let is_path = name.contains(['/', '\\'])
        || path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    if !is_path && !path.is_file() {
        return presets::find(name).and_then(|preset| preset.model()).map_err(Failure::input);
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::input(format!("{name}: {error}")))?;
    let stem = path.file_stem().map_or_else(|| name.into(), |stem| stem.to_string_lossy());
    // A file in a folder of its own is called after the folder.
    let folder = path.parent().and_then(Path::file_name).map(|folder| folder.to_string_lossy());
    let called = match folder {
        Some(folder) if stem == "config" => folder,
        _ => stem,
    };
    families::read_with(facts, &called, &text)
        .map_err(|error: ConfigError| Failure::input(format!("{name}: {error}")))
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let pair = args.pair.resolve()?;
    let answer = Answer::of(&pair.prefill.ranks, &pair.decode.ranks, &pair.asked)?;
    let text = if args.json {
        format!("{:#}\n", as_json(&pair, &answer))
    } else {
        let verdict = verdict(&pair);
        let line = format!("{} {}: {}\n", vllm::ENGINE, verdict.outcome, verdict.reason);
        format!("{}{}{line}", heading(&pair), answer.text())
    };
    output::print(&text);
    answer.end()
}

/// Whether a pair fits: what it moves, or why it is refused.
pub(crate) struct Answer(pub(crate) Result<Report, String>);

impl Answer {
    /// Asks. Input that cannot be answered for is a failure.
    pub(crate) fn of(
        prefill: &[Manifest],
        decode: &[Manifest],
        asked: &Asked,
    ) -> Result<Self, Failure> {
        match report::report(prefill, decode, asked) {
            Ok(report) => Ok(Self(Ok(report))),
            Err(Problem::Incompatible { rank, reason }) => {
                Ok(Self(Err(format!("decode rank {rank}: {reason}"))))
            }
            Err(Problem::TooFewBlocks { engine, needed }) => Err(Failure::input(format!(
                "the request needs {needed} blocks, more than the {engine} engine has"
            ))),
            Err(Problem::Request(error)) => Err(Failure::input(error)),
        }
    }

    /// The table and what follows from it; nothing where the pair is refused.
    pub(crate) fn text(&self) -> String {
        match &self.0 {
            Ok(report) => {
                format!("\n{}\n{}\nkvferry   works\n", report.table(), report.minimum_line())
            }
            Err(_) => String::new(),
        }
    }

    /// The way the command ends.
    pub(crate) fn end(self) -> Result<(), Failure> {
        self.0.map(|_| ()).map_err(Failure::Refused)
    }
}

/// What the leading engine would do with the pair.
pub(crate) fn verdict(pair: &Pair) -> verdict::Verdict {
    fn side(engine: &Engine) -> verdict::EngineSide<'_> {
        verdict::EngineSide { topology: &engine.topology, pools: &engine.pools }
    }
    verdict::judge(&pair.model, side(&pair.prefill), side(&pair.decode), pair.asked.cached)
}

fn heading(pair: &Pair) -> String {
    let kinds: Vec<String> =
        pair.model.layers_by_kind().iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let mut text = format!("model     {}: {}\n", pair.model.name, kinds.join(", "));
    for (name, engine) in [("prefill", &pair.prefill), ("decode", &pair.decode)] {
        text.push_str(&format!("{name:<9} {}\n", describe(engine)));
    }
    let asked = &pair.asked;
    let cached = match asked.cached {
        0 => "none cached".to_owned(),
        cached => format!("{} cached", table::number(cached)),
    };
    text.push_str(&format!(
        "request   {} tokens, {cached}, {} blocks\n",
        table::number(asked.tokens),
        asked.spread.word()
    ));
    text
}

/// An engine in one line.
pub(crate) fn describe(engine: &Engine) -> String {
    let count =
        |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
    let mut blocks: Vec<String> = vec![];
    for group in &engine.pools.groups {
        let (Some(block), Some(kernel)) = (group.block, group.kernel) else { continue };
        let text = match block / kernel {
            1 => format!("{block} tokens a block"),
            split => format!("{block} tokens a block of {split} kernel blocks"),
        };
        if !blocks.contains(&text) {
            blocks.push(text);
        }
    }
    let mut parts = vec![
        engine.topology.to_string(),
        count(engine.ranks.len(), "rank"),
        count(engine.pools.groups.len(), "group"),
    ];
    parts.extend(blocks);
    parts.join(" · ")
}

/// The report for programs.
pub(crate) fn as_json(pair: &Pair, answer: &Answer) -> serde_json::Value {
    let engine = |engine: &Engine| {
        let groups: Vec<_> = engine
            .pools
            .groups
            .iter()
            .map(|group| {
                json!({
                    "name": group.name,
                    "layers": group.caches.len(),
                    "block": group.block,
                    "kernel": group.kernel,
                    "page": group.pages.iter().max(),
                })
            })
            .collect();
        json!({
            "topology": engine.topology.to_string(),
            "ranks": engine.ranks.len(),
            "layout": engine.pools.layout.name(),
            "blocks": engine.pools.blocks,
            "groups": groups,
        })
    };
    let verdict = verdict(pair);
    json!({
        "model": pair.model.name,
        "draft": pair.model.draft,
        "prefill": engine(&pair.prefill),
        "decode": engine(&pair.decode),
        "tokens": pair.asked.tokens,
        "cached": pair.asked.cached,
        "blocks": pair.asked.spread.word(),
        "works": answer.0.is_ok(),
        "reason": answer.0.as_ref().err(),
        "transfer": answer.0.as_ref().ok(),
        "engine": {
            "name": vllm::ENGINE,
            "outcome": match verdict.outcome {
                verdict::Outcome::Works => "works",
                verdict::Outcome::Refuses => "refuses",
                verdict::Outcome::SilentlyWrong => "silently wrong",
            },
            "reason": verdict.reason,
        },
    })
}
