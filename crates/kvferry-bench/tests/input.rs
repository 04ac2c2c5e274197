//! Wrong input: one clear line on standard error, exit code 1, nothing on standard output.

use std::process::Command;

fn bench(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry-bench"))
        .args(arguments)
        .output()
        .expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code().expect("it ends by itself"), text(output.stdout), text(output.stderr))
}

/// Asserts that the command ends with 1, says one line that has all of `parts`, and prints nothing.
fn refuses(arguments: &[&str], parts: &[&str]) {
    let (code, output, errors) = bench(arguments);
    assert_eq!(code, 1, "{arguments:?}: {errors}");
    assert_eq!(output, "", "{arguments:?}");
    assert_eq!(errors.trim_end().lines().count(), 1, "{arguments:?}: {errors}");
    for part in parts {
        assert!(errors.contains(part), "{arguments:?}: no '{part}' in: {errors}");
    }
}

#[test]
fn command_lines() {
    for (arguments, problem) in [
        (&["transfr"][..], "tip: a similar subcommand exists: 'transfer'"),
        (&["gpu", "--suites", "row"], "invalid value 'row' for '--suites <SUITES>'"),
        (&[], "Usage: kvferry-bench <COMMAND>"),
    ] {
        let (code, output, errors) = bench(arguments);
        assert_eq!((code, output.as_str()), (1, ""), "{arguments:?}");
        assert!(errors.contains(problem), "{arguments:?}: {errors}");
    }
    let (code, output, errors) = bench(&["--help"]);
    assert_eq!((code, errors.as_str()), (0, ""));
    assert!(output.contains("Usage: kvferry-bench <COMMAND>"), "{output}");
}

#[test]
fn measurements() {
    let bench = |option: &str, value: &str, parts: &[&str]| {
        refuses(&["transfer", option, value], parts);
    };
    bench("--rounds", "0", &["nothing to measure: --rounds 0, --mib 256; at least 1 each"]);
    bench("--mib", "0", &["nothing to measure: --rounds 9, --mib 0; at least 1 each"]);
    bench("--mib", "99999999999999999", &["--mib 99999999999999999: that is too much"]);
    bench("--pieces", "7", &["--pieces 7: pieces of 7 KiB do not fill 256 MiB evenly"]);
    let lowering = |option: &str, value: &str, parts: &[&str]| {
        refuses(&["lowering", option, value], parts);
    };
    lowering(
        "--only",
        "lamma",
        &["--only lamma: no case has that", "llama-3.1-70b tp=4 -> tp=8, 250"],
    );
    lowering("--svg", "/nonexistent/x.svg", &["--svg /nonexistent/x.svg: No such file"]);
    lowering("--transports", "tcp,rdma", &["--transports rdma: use tcp, nixl or local"]);
    refuses(&["gpu", "--only", "lamma"], &["--only lamma: no case", "tp=8, 8k;"]);
}
