//! `kvferry-bench gpu` without a GPU: on a CPU that stands in for one, and with nothing of the kind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// gpu/driver.c, compiled once.
fn stand_in() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/driver.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libstandin.so");
        let made = library.with_extension(std::process::id().to_string());
        let built = Command::new("cc")
            .args(["-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-pthread", "-o"])
            .args([&made, &source])
            // The kernel as the CPU carries it out.
            .arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../kvferry-cuda/src"))
            .status()
            .expect("a C compiler called cc");
        assert!(built.success(), "driver.c does not compile");
        std::fs::rename(&made, &library).unwrap();
        library
    })
}

/// A small one of the cases.
const CASE: &str = "nemotron-3-nano-30b-a3b tp=2 -> tp=1, 8k";

fn bench(driver: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry-bench"));
    command
        .args(["gpu", "--rounds", "1"])
        .args(arguments)
        .env("KVFERRY_CUDA_DRIVER", driver)
        .env("KVFERRY_NVRTC", driver);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_fails_takes_nothing_from_what_was_measured() {
    let saved = std::env::temp_dir().join(format!("kvferry-bench-gpu-{}", std::process::id()));
    // The stand-in has 1 GiB, which is too little for hand-offs.
    let output =
        bench(stand_in(), &["--suites", "handoff,packed,tcp,rows", "--only", CASE, "--json"])
            .arg("--save")
            .arg(&saved)
            .env("KVFERRY_NIXL", "/nonexistent/nixl")
            .output()
            .unwrap();
    let (json, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{}: {said}", output.status);
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(std::fs::read_to_string(&saved).unwrap().trim(), json.trim());
    std::fs::remove_file(&saved).unwrap();

    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{json}");
    assert_eq!((&rows[0]["wrong_bytes"], &rows[0]["copies"]), (&0.into(), &508.into()), "{json}");
    assert!(results["small"].as_f64().is_some_and(|us| us > 0.0), "{json}");
    let tcp = &results["tcp"].as_array().unwrap()[0];
    assert_eq!((&tcp["wrong_bytes"], &tcp["copies"]), (&0.into(), &508.into()), "{json}");
    assert_eq!(tcp["plain"].as_array().unwrap().len(), 4, "{json}");
    // The table is still there, for whoever watches.
    assert!(said.contains(&format!("{CASE}  ")), "{said}");

    let failures = results["failures"].as_array().unwrap();
    assert_eq!(failures.len(), 3, "{json}");
    let error = said.lines().last().unwrap();
    assert!(
        error.starts_with("error: 3 failed: hand-offs: pages of 16: the smallest pool"),
        "{error}"
    );
    // It was asked for by name.
    assert!(
        error.contains("; packed over nixl: ") && error.contains("/nonexistent/nixl"),
        "{error}"
    );
}

#[test]
fn without_a_gpu_it_says_so() {
    let output = bench(Path::new("/nonexistent/driver"), &["--json"]).output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(text(&output.stdout), "");
    assert!(error.starts_with("error: CUDA's driver cannot be used here"), "{error}");
}

#[test]
fn what_measures_nothing_leaves_no_file() {
    let folder = std::env::temp_dir();
    let file = |name: &str| folder.join(format!("kvferry-bench-gpu-{}-{name}", std::process::id()));
    let (new, kept, link) = (file("new"), file("kept"), file("link"));
    std::fs::write(&kept, "of an earlier run").unwrap();
    std::os::unix::fs::symlink(file("elsewhere"), &link).unwrap();
    for path in [&new, &kept, &link] {
        let mut command = bench(Path::new("/nonexistent/driver"), &["--save"]);
        assert_eq!(command.arg(path).output().unwrap().status.code(), Some(1));
    }
    assert!(!new.exists());
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "of an earlier run");
    assert!(link.is_symlink());
    for path in [&kept, &link, &file("elsewhere")] {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_file_that_cannot_be_written_is_said_before_anything_is_measured() {
    let output =
        bench(Path::new("/nonexistent/driver"), &["--save", "/nonexistent/folder/results"])
            .output()
            .unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: --save /nonexistent/folder/results: "), "{error}");
}

/// What a run says that ends well.
fn results(command: &mut Command) -> serde_json::Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn hand_offs_fit_the_card() {
    let mut command = bench(stand_in(), &["--suites", "handoff", "--json"]);
    // Room for both sides of 8k tokens, and not of 16k.
    let results = results(command.env("KVFERRY_STAND_IN_FREE", "2000000000"));
    let pools = results["pools"].as_array().unwrap();
    for (pool, page) in pools.iter().zip([16, 64]) {
        assert_eq!((&pool["page"], &pool["thousands"]), (&page.into(), &8.into()), "{pool}");
        assert_eq!(pool["left_out"].as_array().unwrap().len(), 7, "{pool}");
    }
    let rows = results["handoffs"].as_array().unwrap();
    assert_eq!((pools.len(), rows.len()), (2, 2), "{results}");
    // Every byte was looked at.
    assert!(rows.iter().all(|row| row["tokens"] == 8192 && row["wrong_bytes"] == 0), "{results}");
}

#[test]
fn nixl_alone_stands_beside_packing() {
    kvferry_nixl::install(None).unwrap();
    let mut command = bench(stand_in(), &["--suites", "packed", "--only", CASE, "--json"]);
    command.env_remove("KVFERRY_NIXL");
    let results = results(command.envs([("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n")]));
    let rows = results["packed"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{results}");
    // Every byte was looked at, after each way.
    assert_eq!(
        (&rows[0]["wrong_bytes"], &rows[0]["copies"]),
        (&0.into(), &508.into()),
        "{results}"
    );
    assert!(rows[0]["alone_us"].as_f64().is_some_and(|us| us > 0.0), "{results}");
}
