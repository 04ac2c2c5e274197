//! `kvferry models`: what the presets keep of a prompt.

use kvferry_models::{Model, presets};
use serde_json::json;

use crate::failure::Failure;
use crate::output;
use crate::text::{self, Columns};

/// List the known models: their layers by kind, and what they keep of a prompt.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only models whose name contains this.
    filter: Option<String>,
    /// Print JSON, with the source of every preset.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let filter = args.filter.as_deref().unwrap_or_default().to_lowercase();
    let mut found: Vec<(presets::Preset, Model)> = vec![];
    for preset in presets::all().filter(|preset| preset.name.contains(&filter)) {
        found.push((preset, preset.model().map_err(Failure::input)?));
    }
    if found.is_empty() {
        // Says which is spelled most alike.
        return Err(Failure::input(presets::find(&filter).expect_err("no name contains it")));
    }
    if args.json {
        let list: Vec<_> = found.iter().map(|(preset, model)| describe(preset, model)).collect();
        output::print(&format!("{:#}\n", json!({ "models": list })));
        return Ok(());
    }
    let mut columns =
        Columns::new(&["model", "layers", ">per token", ">per sequence", "sliding window"]);
    for (preset, model) in &found {
        let sizes = model.footprint();
        let kinds: Vec<String> =
            model.layers_by_kind().iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let some = |bytes| if bytes == 0 { "–".to_owned() } else { text::bytes(bytes) };
        let window = match window(model) {
            Some(tokens) => {
                format!("{tokens} tokens, {} each", text::bytes(sizes.per_window_token))
            }
            None => String::new(),
        };
        columns.row([
            preset.name.to_owned(),
            kinds.join(", "),
            some(sizes.per_token),
            some(sizes.per_sequence),
            window,
        ]);
    }
    output::print(&columns.render());
    Ok(())
}

fn window(model: &Model) -> Option<u64> {
    model.caches.iter().find_map(|cache| cache.window().tokens)
}

fn describe(preset: &presets::Preset, model: &Model) -> serde_json::Value {
    let (sizes, source) = (model.footprint(), preset.source());
    let kinds = model.layers_by_kind().into_iter();
    json!({
        "name": preset.name,
        "family": model.family,
        "format": model.format.name,
        "layers": model.layers,
        "layers_by_kind": kinds.map(|(kind, count)| json!({ "kind": kind, "count": count }))
            .collect::<Vec<_>>(),
        "bytes_per_token": sizes.per_token,
        "bytes_per_window_token": sizes.per_window_token,
        "window_tokens": window(model),
        "bytes_per_sequence": sizes.per_sequence,
        "source": {
            "model": source.hf_id,
            "found_in": source.source,
            "confidence": source.confidence,
            "notes": source.notes,
        },
    })
}
