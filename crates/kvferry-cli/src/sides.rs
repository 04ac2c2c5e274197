//! The two engines of a pair, as the command line names them: by a model and two topologies, or by the
//! manifests that running engines dumped.

use std::path::{Path, PathBuf};

use kvferry_layout::{MAX_JSON_BYTES, Manifest};
use kvferry_models::rules::sglang;
use kvferry_models::rules::vllm::{self, Pools};
use kvferry_models::{Facts, Model, Topology, families, presets};

use crate::failure::Failure;
use crate::hub;
use crate::tables::{self, Spread};
use crate::text;

/// A pair of engines and a request.
#[derive(Debug, clap::Args)]
pub(crate) struct PairArgs {
    /// The model: as 'vllm serve' takes it (OWNER/NAME, or a folder), a preset (any unambiguous part of its name; see
    /// 'kvferry models'), or a config.json.
    /// Not needed where both sides are manifests.
    #[arg(long, value_name = "NAME|FILE")]
    model: Option<String>,
    /// A draft model for speculative decoding: a preset, a config.json, or 'mtp' for the layers that
    /// the model itself brings along.
    #[arg(long, value_name = "NAME|FILE|mtp", requires = "model")]
    draft: Option<String>,
    /// Kinds of states and families of your own, as JSON: see docs/new-model.md.
    #[arg(long, value_name = "FILE", requires = "model")]
    facts: Option<PathBuf>,
    /// The prefill engine: a topology such as tp=4,pp=2 (keys: tp, pp, pcp, dcp, interleave, block, kernel,
    /// layout, conv, spec, kv, kscale, vscale, blocks, hma, caching), or the manifests that its ranks dumped:
    /// files, or the folder they are in.
    #[arg(long, value_name = "TOPOLOGY|MANIFESTS", num_args = 1.., default_value = "tp=1")]
    prefill: Vec<String>,
    /// The decode engine, named in the same way.
    #[arg(long, value_name = "TOPOLOGY|MANIFESTS", num_args = 1.., default_value = "tp=1")]
    decode: Vec<String>,
    /// The engine whose pages both sides have where they are given as topologies, and whose own transfer is judged.
    #[arg(long, value_enum, default_value_t = Kind::Vllm)]
    engine: Kind,
    /// Tokens of the request: a number, or as in 128k (of 1024) or 1m.
    #[arg(long, default_value_t = 8192, value_parser = text::parse_number)]
    tokens: u64,
    /// How many of these tokens the decode side holds already.
    #[arg(long, default_value_t = 0, value_parser = text::parse_number)]
    cached: u64,
    /// Let the request's blocks follow each other in memory (the best case) instead of being scattered.
    #[arg(long)]
    contiguous: bool,
}

/// Kinds of engines that there are rules for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Vllm,
    Sglang,
}

/// A pair whose facts are all there.
pub(crate) struct Pair {
    /// The model, where a side is made from it.
    pub(crate) model: Option<Model>,
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) asked: Asked,
}

/// One engine of a pair.
pub(crate) struct Engine {
    /// One manifest for every rank, at least one.
    pub(crate) ranks: Vec<Manifest>,
    /// How it is run, where that was said; dumped manifests do not tell.
    pub(crate) run: Option<Run>,
}

/// How an engine is run, and what vLLM decides for that, if it is one of vLLM.
pub(crate) struct Run {
    pub(crate) topology: Topology,
    pub(crate) pools: Option<Pools>,
}

/// A request to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) tokens: u64,
    /// Tokens that the decode side holds already.
    pub(crate) cached: u64,
    pub(crate) spread: Spread,
}

/// The most tokens that a made-up request may have.
const MAX_TOKENS: u64 = 1 << 28;

impl PairArgs {
    /// Makes or reads the manifests of both sides.
    pub(crate) fn resolve(&self) -> Result<Pair, Failure> {
        let asked = self.asked()?;
        let model = self.model.as_deref().map(|name| self.model(name)).transpose()?;
        let side = |name: &str, words: &[String]| match words {
            [word] if !is_path(word) => made(model.as_ref(), name, word, &asked, self.engine),
            words if words.iter().all(|word| word.parse::<Topology>().is_ok()) => {
                Err(Failure::input(format!(
                    "--{name}: '{}' is one topology in {} words: write --{name} {}",
                    words.join(" "),
                    words.len(),
                    words.join(",")
                )))
            }
            paths => read(name, paths),
        };
        let (prefill, decode) = (side("prefill", &self.prefill)?, side("decode", &self.decode)?);
        Ok(Pair { model, prefill, decode, asked })
    }

    fn asked(&self) -> Result<Asked, Failure> {
        let spread = if self.contiguous { Spread::Contiguous } else { Spread::Scattered };
        let asked = Asked { tokens: self.tokens, cached: self.cached, spread };
        if asked.tokens > MAX_TOKENS {
            return Err(too_long(&asked));
        }
        if asked.cached > asked.tokens {
            let (cached, tokens) = (asked.cached, asked.tokens);
            let problem = format!("--cached {cached} is more than --tokens {tokens}");
            return Err(Failure::input(problem));
        }
        Ok(asked)
    }

    fn model(&self, name: &str) -> Result<Model, Failure> {
        let facts = self.facts()?;
        let model = load(name, &facts)?;
        match self.draft.as_deref() {
            None => Ok(model),
            Some("mtp") => {
                let name = model.name.clone();
                let missing = || {
                    Failure::input(format!("--draft mtp: {name} has no draft layers of its own"))
                };
                model.with_own_draft().ok_or_else(missing)
            }
            Some(draft) => Ok(model.with_draft(&load(draft, &facts)?)),
        }
    }

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

/// A state's name in two parts: the layer, and what it is there (`layers.3` and `k`).
pub(crate) fn name_parts(state: &str) -> (&str, &str) {
    state.rsplit_once('/').unwrap_or(("", state))
}

fn too_long(asked: &Asked) -> Failure {
    Failure::input(format!("--tokens {} is too long; at most {MAX_TOKENS}", asked.tokens))
}

/// Whether a word names files rather than a preset or a topology.
fn is_path(word: &str) -> bool {
    let path = Path::new(word);
    word.contains(['/', '\\'])
        || path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
        || path.exists()
}

/// Reads a model: a file where there is one, what is known of a name on the hub, and a preset otherwise.
fn load(name: &str, facts: &Facts) -> Result<Model, Failure> {
    if hub::is_name(name) {
        return match hub::find(name).map_err(Failure::input)? {
            hub::Found::Config(path) => config(facts, name, &path),
            hub::Found::Preset(preset) => {
                let released = preset.source().hf_id;
                if !released.eq_ignore_ascii_case(name) {
                    eprintln!("{name}: by the preset {}, from {released}", preset.name);
                }
                preset.model().map_err(Failure::input)
            }
        };
    }
    // A folder may be a model's own, as it was downloaded.
    let inside = Path::new(name).join("config.json");
    let path = if inside.is_file() { &inside } else { Path::new(name) };
    if !is_path(name) || path.is_dir() {
        return presets::find(name).and_then(|preset| preset.model()).map_err(Failure::input);
    }
    let stem = path.file_stem().map_or_else(|| name.into(), |stem| stem.to_string_lossy());
    // A file in a folder of its own is called after the folder.
    let folder = path.parent().and_then(Path::file_name).map(|folder| folder.to_string_lossy());
    let called = match folder {
        Some(folder) if stem == "config" => folder,
        _ => stem,
    };
    config(facts, &called, path)
}

/// Reads the model that a `config.json` describes.
fn config(facts: &Facts, called: &str, path: &Path) -> Result<Model, Failure> {
    let problem =
        |error: &dyn std::fmt::Display| Failure::input(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| problem(&error))?;
    families::read_with(facts, called, &text).map_err(|error| problem(&error))
}

/// An engine that runs the model in this topology, as its kind would lay it out.
fn made(
    model: Option<&Model>,
    name: &str,
    word: &str,
    asked: &Asked,
    kind: Kind,
) -> Result<Engine, Failure> {
    let problem = |error: &dyn std::fmt::Display| Failure::input(format!("--{name}: {error}"));
    let mut topology: Topology = word.parse().map_err(|error| match word.contains('=') {
        true => problem(&error),
        false => problem(&format!("{error}; nor is there a file or folder '{word}'")),
    })?;
    let Some(model) = model else {
        return Err(problem(&format!(
            "'{word}' is a topology: give the model too (--model), or name a folder of manifests"
        )));
    };
    if kind == Kind::Sglang {
        let ranks = sglang::manifests(model, &topology, name).map_err(|error| problem(&error))?;
        return Ok(Engine { ranks, run: Some(Run { topology, pools: None }) });
    }
    let mut pools = vllm::pools(model, &topology).map_err(|error| problem(&error))?;
    let make = |pools: &Pools, topology: &Topology| {
        pools.manifests(model, topology, name).map_err(|error| problem(&error))
    };
    let mut ranks = make(&pools, &topology)?;
    // A pool that is not told its size is large enough.
    let needed = tables::blocks_needed(&ranks[0], asked.tokens).saturating_mul(2);
    if topology.blocks.is_none() && needed > u64::from(pools.blocks) {
        pools.blocks = u32::try_from(needed).map_err(|_| too_long(asked))?;
        topology.blocks = Some(pools.blocks);
        ranks = make(&pools, &topology)?;
    }
    Ok(Engine { ranks, run: Some(Run { topology, pools: Some(pools) }) })
}

/// A running engine, from what its ranks dumped: they share their block tables.
fn read(name: &str, words: &[String]) -> Result<Engine, Failure> {
    let problem = |error: String| Failure::input(format!("--{name}: {error}"));
    let mut paths = vec![];
    for word in words {
        let path = PathBuf::from(word);
        match path.is_dir() {
            true => paths.extend(manifests_in(&path).map_err(problem)?),
            false => paths.push(path),
        }
    }
    let ranks = paths.iter().map(|path| manifest(path)).collect::<Result<Vec<_>, _>>();
    let mut ranks: Vec<(&PathBuf, Manifest)> = paths.iter().zip(ranks.map_err(problem)?).collect();
    for (index, (path, rank)) in ranks.iter().enumerate() {
        let twice = ranks[..index].iter().find(|(_, known)| known.rank() == rank.rank());
        if let Some((other, known)) = twice {
            let (one, two) = (other.display(), path.display());
            let engines = match known.engine() == rank.engine() {
                true => String::new(),
                false => format!(" of engines '{}' and '{}'", known.engine(), rank.engine()),
            };
            let number = rank.rank();
            return Err(problem(format!(
                "{one} and {two} both describe rank {number}{engines}: name the manifests of one \
                 engine, each rank once"
            )));
        }
        let (first, known) = &ranks[0];
        if let Some(difference) = other_tables(known, rank) {
            let (one, two) = (first.display(), path.display());
            return Err(problem(format!(
                "{one} and {two} do not describe ranks of one engine: {difference}"
            )));
        }
    }
    ranks.sort_by_key(|(_, rank)| rank.rank());
    Ok(Engine { ranks: ranks.into_iter().map(|(_, rank)| rank).collect(), run: None })
}

/// How the block tables of two ranks differ, if they do: the ranks of an engine share theirs.
fn other_tables(one: &Manifest, other: &Manifest) -> Option<String> {
    let (some, others) = (one.groups(), other.groups());
    if some.len() != others.len() {
        return Some(format!("{} groups and {}", some.len(), others.len()));
    }
    let tokens = |block: Option<u64>| match block {
        Some(tokens) => format!("{tokens} tokens in a block"),
        None => "whole sequences in a block".to_owned(),
    };
    let mut pairs = some.iter().zip(others);
    let (a, b) = pairs.find(|(a, b)| a.tokens_per_block != b.tokens_per_block)?;
    let (x, y) = (tokens(a.tokens_per_block), tokens(b.tokens_per_block));
    Some(format!("group '{}' has {x}, group '{}' {y}", a.name, b.name))
}

/// The files in a folder that may be manifests.
fn manifests_in(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).map_err(problem)? {
        let path = entry.map_err(problem)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(format!(
            "{} has no manifests (*.json); a server that is started with \
             KVFERRY_DUMP_MANIFEST={0} writes them there",
            folder.display()
        ));
    }
    found.sort();
    Ok(found)
}

fn manifest(path: &Path) -> Result<Manifest, String> {
    let problem = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let size = std::fs::metadata(path).map_err(|error| problem(&error))?.len();
    if size > MAX_JSON_BYTES as u64 {
        let most = MAX_JSON_BYTES;
        return Err(problem(&format!("{size} bytes are too many for a manifest (at most {most})")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| problem(&error))?;
    Manifest::from_json(&text).map_err(|error| problem(&error))
}
