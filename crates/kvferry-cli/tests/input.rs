//! Wrong input: one clear line on standard error, exit code 1, nothing on standard output.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use kvferry_models::{Topology, presets, rules::vllm};

fn kvferry(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(arguments)
        .output()
        .expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code().expect("it ends by itself"), text(output.stdout), text(output.stderr))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Asserts that the command ends with 1, says one line that has all of `parts`, and prints nothing.
fn refuses(arguments: &[&str], parts: &[&str]) {
    let (code, output, errors) = kvferry(arguments);
    assert_eq!(code, 1, "{arguments:?}: {errors}");
    assert_eq!(output, "", "{arguments:?}");
    assert_eq!(errors.trim_end().lines().count(), 1, "{arguments:?}: {errors}");
    for part in parts {
        assert!(errors.contains(part), "{arguments:?}: no '{part}' in: {errors}");
    }
}

#[test]
fn topologies() {
    let plan = |prefill: &'static str, parts: &[&str]| {
        refuses(&["plan", "--model", "llama-3.1-8b", "--prefill", prefill], parts);
    };
    plan("tp=5", &["vLLM 0.32 cannot run", "32 attention heads do not divide by 5"]);
    plan("tp=64", &["cannot run", "do not divide by 64"]);
    plan("tp=100000", &["'100000' is not a value for 'tp'"]);
    plan("tp=0", &["'0' is not a value for 'tp'"]);
    plan("tp=four", &["'four' is not a value for 'tp'"]);
    plan("blok=16", &["no key 'blok'", "did you mean 'block'?"]);
    plan(
        "tp=2,dp=2",
        &["'dp' does not belong in a topology", "a cache of its own", "Leave it out"],
    );
    plan("ep=4", &["'ep' does not belong in a topology", "experts keep nothing of a prompt"]);
    refuses(
        &["plan", "--model", "llama-3.1-8b", "--prefill", "tp=4", "pp=2"],
        &["'tp=4 pp=2' is one topology in 2 words: write --prefill tp=4,pp=2"],
    );
    plan("tp=2,tp=4", &["given twice"]);
    plan("tp", &["key=value"]);
    plan("tp=2,layout=LBHCN", &["did you mean 'LBHNC'?"]);
    plan("conv=dd", &["one of sd, ds"]);
    plan("block=48,kernel=32", &["does not divide"]);
    plan("block=17", &["cannot run", "multiples of 16"]);
    plan("pp=40", &["only 32 layers"]);
    plan("tp=2,blocks=10", &["needs 513 blocks, but the prefill engine has 10", "fewer --tokens"]);
    refuses(
        &["plan", "--model", "kimi-k3", "--prefill", "tp=5"],
        &["vLLM 0.32 cannot run kimi-k3 with tp=5", "96 attention heads"],
    );
}

#[test]
fn models() {
    refuses(&["plan", "--model", "kimi-liner-48b-a3b"], &["did you mean 'kimi-linear-48b-a3b'?"]);
    refuses(&["plan", "--model", "qwen3.5"], &["qwen3.5-27b", "say which"]);
    refuses(&["models", "no-such-model"], &["no preset 'no-such-model'"]);
    refuses(&["plan", "--model", "no/such/config.json"], &["no/such/config.json"]);
    let folder = Folder::new("models");
    let broken = folder.file("broken.json", "{\"model_type\": \"llama\",");
    refuses(&["plan", "--model", &broken], &["not JSON"]);
    let unknown = folder.file("unknown.json", "{\"model_type\": \"lama\"}");
    refuses(&["plan", "--model", &unknown], &["'lama' is not known", "did you mean 'llama'?"]);
    let missing = folder.file("missing.json", "{\"model_type\": \"llama\"}");
    refuses(&["plan", "--model", &missing], &["no field 'num_hidden_layers'", "'llama'"]);
    refuses(
        &["plan", "--model", "llama-3.1-8b", "--draft", "mtp"],
        &["--draft mtp: llama-3.1-8b has no draft layers of its own"],
    );
}

/// What `vllm serve` takes.
#[test]
fn names_on_the_hub() {
    let folder = Folder::new("hub");
    let asked = |name: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["plan", "--json", "--tokens", "1k", "--model", name])
            .env("HF_HUB_CACHE", &folder.0)
            .output()
            .expect("the command starts");
        let text = |bytes| String::from_utf8(bytes).expect("the output is text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, _, errors) = asked("Qwen/Qwen3-8B");
    assert_eq!(code, Some(1));
    let remedy = "'hf download Qwen/Qwen3-8B config.json'";
    assert!(errors.contains("no preset") && errors.contains(remedy), "{errors}");
    // By its name, in whatever form it was released.
    let (code, plan, said) = asked("meta-llama/Llama-3.1-8B-Instruct");
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("by the preset llama-3.1-8b, from meta-llama/Llama-3.1-8B"), "{said}");
    assert!(plan.contains("\"tokens\": 1024"), "{plan}");
    // As `hf download` leaves it, which says more than a preset does.
    let model = folder.0.join("models--Qwen--Qwen3-8B");
    let snapshot = model.join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), "abc\n").unwrap();
    fs::write(snapshot.join("config.json"), presets::find("qwen3-32b").unwrap().config).unwrap();
    let (code, plan, said) = asked("Qwen/Qwen3-8B");
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert!(plan.contains("Qwen/Qwen3-8B"), "{plan}");
    // Nor can a name lead out of the cache.
    assert!(asked("../etc").2.contains("../etc"));
}

#[test]
fn requests() {
    let plan = ["plan", "--model", "llama-3.1-8b"];
    refuses(
        &[&plan[..], &["--tokens", "10", "--cached", "11"]].concat(),
        &["--cached 11 is more than --tokens 10"],
    );
    refuses(&[&plan[..], &["--tokens", "99999999999"]].concat(), &["too long"]);
    let nothing = ["--tokens", "64", "--cached", "64", "--link", "1Gbit"];
    refuses(&[&plan[..], &nothing].concat(), &["--link: this request moves nothing"]);
}

#[test]
fn command_lines() {
    for (arguments, problem) in [
        (&["plam"][..], "tip: some similar subcommands exist: 'explain', 'plan'"),
        (&["plan"], "--prefill: 'tp=1' is a topology: give the model too (--model)"),
        (
            &["plan", "--model", "llama-3.1-8b", "--prefil", "tp=2"],
            "tip: a similar argument exists: '--prefill'",
        ),
        (
            &["plan", "--model", "llama-3.1-8b", "--tokens", "many"],
            "invalid value 'many' for '--tokens <TOKENS>'",
        ),
        (
            &["plan", "--model", "llama-3.1-8b", "--tokens", "99999999999999999999k"],
            "invalid value '99999999999999999999k' for '--tokens <TOKENS>': the number is too large",
        ),
        (
            &["plan", "--model", "llama-3.1-8b", "--link", "100"],
            "invalid value '100' for '--link <RATE>': a rate is as in 100Gbit or 12.5GB",
        ),
        (&["plan", "--model", "llama-3.1-8b", "--requests", "2"], "--link <RATE>"),
        (&["check", "a.json"], "unexpected argument 'a.json' found"),
        (&["explain", "--out"], "--out <FILE>"),
        (&["plan", "--draft", "mtp"], "--model <NAME|FILE>"),
        (&[], "Usage: kvferry <COMMAND>"),
    ] {
        let (code, output, errors) = kvferry(arguments);
        assert_eq!((code, output.as_str()), (1, ""), "{arguments:?}");
        assert!(errors.contains(problem), "{arguments:?}: {errors}");
    }
    let (code, output, errors) = kvferry(&["--help"]);
    assert_eq!((code, errors.as_str()), (0, ""));
    assert!(output.contains("Usage: kvferry <COMMAND>"), "{output}");
}

#[test]
fn manifests() {
    let folder = Folder::new("manifests");
    let model = presets::find("llama-3.1-8b").unwrap().model().unwrap();
    let topology: Topology = "tp=2".parse().unwrap();
    let ranks = vllm::manifests(&model, &topology, "engine").unwrap();
    let text = ranks[0].to_json();
    let good = folder.file("good.json", &text);
    let plan = |prefill: &[&str], decode: &str, parts: &[&str]| {
        let sides = [&["plan", "--prefill"], prefill, &["--decode", decode]];
        refuses(&sides.concat(), parts);
    };
    let truncated = folder.file("truncated.json", &text[..text.len() / 2]);
    plan(&[&truncated], &good, &["--prefill: ", "truncated.json: ", "EOF"]);
    let other = folder.file("other.json", "{\"hello\": 1}");
    plan(&[&good], &other, &["--decode: ", "other.json: ", "no 'kvferry_manifest' version"]);
    plan(&[&good], "nowhere.json", &["--decode: nowhere.json: No such file or directory"]);
    plan(&[&good, &good], &good, &["both describe rank 0: name the manifests of one engine"]);
    let kimi = presets::find("kimi-linear").unwrap().model().unwrap();
    let rank = &vllm::manifests(&kimi, &topology, "engine").unwrap()[1];
    let foreign = folder.file("foreign.json", &rank.to_json());
    plan(&[&good, &foreign], &good, &["do not describe ranks of one engine: 1 groups and 4"]);
    // A folder with the dumps of two engines.
    let both = Folder::new("both");
    let decode = &vllm::manifests(&model, &topology, "other").unwrap()[0];
    both.file("a.json", &text);
    both.file("b.json", &decode.to_json());
    let path = both.0.display().to_string();
    plan(
        &[&path],
        &good,
        &["a.json and ", "b.json both describe rank 0 of engines 'engine' and 'other'"],
    );
    let empty = Folder::new("empty");
    let path = empty.0.display().to_string();
    plan(&[&path], &good, &["has no manifests (*.json)", "KVFERRY_DUMP_MANIFEST="]);
    // A topology needs a model.
    plan(&["tp=2"], &good, &["--prefill: 'tp=2' is a topology: give the model too (--model)"]);
    plan(&["dumps"], &good, &["--prefill: ", "nor is there a file or folder 'dumps'"]);
}

#[test]
fn addresses() {
    refuses(&["status", "nohost"], &["'nohost' is not an address: give host:port"]);
    refuses(&["status", "127.0.0.1:1"], &["127.0.0.1:1 does not answer: ", "refused"]);
    let missing = ["status", "127.0.0.1:1", "--key-file", "/no/such/key"];
    refuses(&missing, &["cannot read the key file /no/such/key", "No such file"]);
    let unknown =
        "no such host:1 does not answer: looking up the name of the host: entity not found";
    refuses(&["status", "no such host:1"], &[unknown]);
    refuses(
        &["status", "http://localhost:8100"],
        &["give host:port, of kvferry's own port", "not a URL"],
    );
    refuses(&["drain", "nohost"], &["'nohost' is not an address: give host:port"]);
    refuses(&["drain", "127.0.0.1:1"], &["127.0.0.1:1 does not answer: ", "refused"]);
}
