//! Prints the manifests of models and topologies as JSON: one case a line on standard input, one
//! answer a line on standard output. The comparison with the installed vLLM reads it.
//!
//! A case is `{"model": "kimi-linear", "draft": null, "topology": "tp=4"}`; `model` and `draft` are
//! presets or files, and a draft of `mtp` means the model's own. An answer has `manifests` and `groups`, or
//! `error`.

use std::io::{BufRead, Write};

use kvferry_models::rules::vllm;
use kvferry_models::{Model, Topology, families, presets};
use serde_json::{Value, json};

fn main() -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&line?)
            .unwrap_or_else(|error| json!({ "error": error.to_string() }).to_string());
        writeln!(output, "{answer}")?;
    }
    Ok(())
}

fn load(name: &str) -> Result<Model, Box<dyn std::error::Error>> {
    match name.ends_with(".json") {
        true => Ok(families::read("draft", &std::fs::read_to_string(name)?)?),
        false => Ok(presets::find(name)?.model()?),
    }
}

fn answer(line: &str) -> Result<String, Box<dyn std::error::Error>> {
    let case: Value = serde_json::from_str(line)?;
    let text = |key: &str| case[key].as_str().unwrap_or_default();
    let mut model = load(text("model"))?;
    match text("draft") {
        "" => {}
        "mtp" => model = model.with_own_draft().ok_or("the model has no draft of its own")?,
        name => model = model.with_draft(&load(name)?),
    }
    let topology: Topology = text("topology").parse()?;
    let pools = vllm::pools(&model, &topology)?;
    let groups = pools.groups.iter().map(|group| {
        let layers = group.caches.iter().map(|&cache| {
            let cache = &model.caches[cache];
            let states: Vec<_> = cache.states().map(|state| &state.name).collect();
            json!({ "layer": cache.layer, "sort": cache.sort.word(), "states": states })
        });
        json!({
            "block": group.block,
            "kernel": group.kernel,
            "pages": group.pages,
            "layers": layers.collect::<Vec<_>>(),
        })
    });
    let groups: Vec<_> = groups.collect();
    let manifests = vllm::manifests(&model, &topology, "engine")?;
    // As they are, in one line: they are megabytes, and nobody here looks at them.
    let in_one_line = |json: String| json.lines().map(str::trim_start).collect::<String>();
    let manifests = manifests.iter().map(|manifest| in_one_line(manifest.to_json()));
    let manifests = manifests.collect::<Vec<_>>().join(",");
    let (groups, stages) = (json!(groups), json!(pools.stages));
    Ok(format!(r#"{{"groups":{groups},"manifests":[{manifests}],"stages":{stages}}}"#))
}
