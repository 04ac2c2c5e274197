//! `kvferry plan`: will a pair work, and what would it move?

use std::collections::BTreeSet;

use kvferry_layout::Manifest;
use kvferry_models::rules::sglang;
use kvferry_models::rules::vllm::{self, verdict};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::output;
use crate::report::Answer;
use crate::sides::{Engine, Pair, PairArgs, name_parts};
use crate::sizing::{LinkArgs, Sizing};
use crate::text;

/// Tell whether a pair of engines works, how many bytes a request moves, and in how many copies.
///
/// The engines are named by a model and two topologies, or by the manifests that running servers
/// dumped (KVFERRY_DUMP_MANIFEST=FOLDER):
///
///   kvferry plan --model kimi-linear --prefill tp=4 --decode tp=2,pp=2
///
///   kvferry plan --prefill dumps/prefill --decode dumps/decode
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    pair: PairArgs,
    #[command(flatten)]
    link: LinkArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let pair = args.pair.resolve()?;
    let answer = Answer::of(&pair)?;
    let sizing = args.link.size(&pair, &answer)?;
    output::print(&match args.json {
        true => format!("{:#}\n", as_json(&pair, &answer, sizing.as_ref())),
        false => heading(&pair) + &conclusion(&pair, &answer, sizing.as_ref()),
    });
    answer.end()
}

/// What the engine's own transfer would do with the pair, and whose that is; unknown where a side is manifests,
/// which do not carry what that depends on.
fn verdict(pair: &Pair) -> Option<(&'static str, verdict::Verdict)> {
    let model = pair.model.as_ref()?;
    let (prefill, decode) = (pair.prefill.run.as_ref()?, pair.decode.run.as_ref()?);
    Some(match (&prefill.pools, &decode.pools) {
        (Some(from), Some(to)) => {
            let prefill = verdict::EngineSide { topology: &prefill.topology, pools: from };
            let decode = verdict::EngineSide { topology: &decode.topology, pools: to };
            (vllm::ENGINE, verdict::judge(model, prefill, decode, pair.asked.cached))
        }
        _ => (sglang::ENGINE, sglang::verdict::judge(model, &prefill.topology, &decode.topology)),
    })
}

fn heading(pair: &Pair) -> String {
    let asked = &pair.asked;
    let cached = match asked.cached {
        0 => "none cached".to_owned(),
        cached => format!("{} cached", text::number(cached)),
    };
    let tokens = text::number(asked.tokens);
    line("model", &model(pair))
        + &line("prefill", &describe(&pair.prefill))
        + &line("decode", &describe(&pair.decode))
        + &line("request", &format!("{tokens} tokens, {cached}, {} blocks", asked.spread.word()))
}

/// What it moves, and what becomes of it: with kvferry, and without.
fn conclusion(pair: &Pair, answer: &Answer, sizing: Option<&Sizing>) -> String {
    let mut text = String::from("\n");
    match answer {
        Answer::Works { report, .. } => {
            text += &format!("{}\n", report.table());
            text += &line("moves", &report.against_minimum());
            for (number, fact) in sizing.map(Sizing::lines).iter().flatten().enumerate() {
                text += &line(if number == 0 { "link" } else { "" }, fact);
            }
            text += &line("kvferry", "works: every byte that decode needs lands in its place");
        }
        Answer::Refused(_) => {
            text +=
                &line("kvferry", "refuses this pair before the first byte moves (reason below)");
        }
    }
    let Some((engine, verdict)) = verdict(pair) else { return text };
    let (what, why) = match verdict.outcome {
        verdict::Outcome::Works => ("works: its own connector is not known to fail here", None),
        verdict::Outcome::Refuses => {
            ("refuses: its own connector stops with an error", Some(&verdict.reason))
        }
        verdict::Outcome::SilentlyWrong => (
            "is silently wrong: its own connector reports success, but decode gets wrong bytes",
            Some(&verdict.reason),
        ),
    };
    text += &line(engine, what);
    if let Some(why) = why {
        text += &line("", &format!("because {why}"));
    }
    text
}

/// A line of text under a name in the margin; several lines where it is long.
fn line(name: &str, text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let room = (COLUMNS - MARGIN).saturating_sub(word.chars().count() + 1);
        match lines[last].as_str() {
            "" => lines[last].push_str(word),
            line if line.chars().count() <= room => lines[last].extend([" ", word]),
            _ => lines.push(word.to_owned()),
        }
    }
    let name = format!("{name:<MARGIN$}");
    name + &lines.join(&format!("\n{:MARGIN$}", "")) + "\n"
}

/// Columns of text, and those of its margin.
const COLUMNS: usize = 100;
const MARGIN: usize = 11;

/// The model in one line.
fn model(pair: &Pair) -> String {
    let Some(model) = &pair.model else { return name(pair) };
    let kinds = model.layers_by_kind();
    let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    format!("{}: {}", model.name, kinds.join(", "))
}

/// The model's name, as the manifests have it.
pub(crate) fn name(pair: &Pair) -> String {
    let identity = pair.decode.ranks[0].identity();
    identity.get("model").cloned().unwrap_or_else(|| "a model without a name".to_owned())
}

/// An engine in one line.
pub(crate) fn describe(engine: &Engine) -> String {
    let count = |count: usize, word| text::many(count as u64, word);
    let mut blocks: Vec<String> = vec![];
    for group in groups(engine) {
        let (Some(block), Some(kernel)) = (group.block, group.kernel) else { continue };
        let text = match block / kernel {
            1 => format!("{block} tokens a block"),
            split => format!("{block} tokens a block of {split} kernel blocks"),
        };
        if !blocks.contains(&text) {
            blocks.push(text);
        }
    }
    let called = match &engine.run {
        Some(run) => run.topology.to_string(),
        None => format!("engine '{}'", engine.ranks[0].engine()),
    };
    let ranks = &engine.ranks;
    let mut parts =
        vec![called, count(ranks.len(), "rank"), count(ranks[0].groups().len(), "group")];
    parts.extend(blocks);
    parts.join(" · ")
}

/// A group of an engine: what its ranks say of it together.
pub(crate) struct EngineGroup {
    pub(crate) name: String,
    pub(crate) layers: usize,
    /// Tokens in a block; `None` where a block holds a whole sequence.
    pub(crate) block: Option<u64>,
    /// Tokens in a kernel block.
    pub(crate) kernel: Option<u64>,
    /// Tokens that stay live, where not all do.
    pub(crate) window: Option<u64>,
}

/// The groups of an engine. Pipeline stages hold different layers of a group.
pub(crate) fn groups(engine: &Engine) -> Vec<EngineGroup> {
    let ranks = &engine.ranks;
    let group = |number: usize| {
        let group = &ranks[0].groups()[number];
        let mut layers = BTreeSet::new();
        let mut kernels = 1;
        for rank in ranks {
            for (index, piece) in rank.groups()[number].pieces.iter().enumerate() {
                layers.insert(name_parts(&piece.state).0);
                if let Some(kernel) = piece.view.kernel {
                    kernels = kernels.max(rank.entries_per_block(number, index) / kernel.entries);
                }
            }
        }
        EngineGroup {
            name: group.name.clone(),
            layers: layers.len(),
            block: group.tokens_per_block,
            kernel: group.tokens_per_block.map(|tokens| tokens / kernels),
            window: group.window.tokens,
        }
    };
    (0..ranks[0].groups().len()).map(group).collect()
}

/// The answer for programs.
pub(crate) fn as_json(pair: &Pair, answer: &Answer, sizing: Option<&Sizing>) -> Value {
    let engine = |engine: &Engine| {
        let groups: Vec<Value> = groups(engine)
            .iter()
            .map(|group| {
                json!({
                    "name": group.name,
                    "layers": group.layers,
                    "block": group.block,
                    "kernel": group.kernel,
                    "window": group.window,
                })
            })
            .collect();
        let blocks = engine.ranks[0].groups().iter().map(|group| group.blocks).min();
        let run = engine.run.as_ref();
        json!({
            "engine": engine.ranks[0].engine(),
            "topology": run.map(|run| run.topology.to_string()),
            "layout": run.and_then(|run| run.pools.as_ref()).map(|pools| pools.layout.name()),
            "ranks": engine.ranks.iter().map(Manifest::label).collect::<Vec<_>>(),
            "blocks": blocks,
            "groups": groups,
        })
    };
    let (report, reason) = match answer {
        Answer::Works { report, .. } => (Some(report), None),
        Answer::Refused(reason) => (None, Some(reason)),
    };
    let verdict = verdict(pair).map(|(engine, verdict)| {
        json!({
            "name": engine,
            "outcome": match verdict.outcome {
                verdict::Outcome::Works => "works",
                verdict::Outcome::Refuses => "refuses",
                verdict::Outcome::SilentlyWrong => "silently wrong",
            },
            "reason": verdict.reason,
        })
    });
    let mut json = json!({
        "model": name(pair),
        "draft": pair.decode.ranks[0].identity().get("draft"),
        "prefill": engine(&pair.prefill),
        "decode": engine(&pair.decode),
        "tokens": pair.asked.tokens,
        "cached": pair.asked.cached,
        "blocks": pair.asked.spread.word(),
        "works": report.is_some(),
        "reason": reason,
        "transfer": report,
        "engine": verdict,
    });
    if let Some(sizing) = sizing {
        json["link"] = json!(sizing);
        json["link"]["text"] = json!(sizing.lines());
    }
    json
}
