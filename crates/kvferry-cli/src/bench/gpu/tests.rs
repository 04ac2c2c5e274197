//! What a run keeps, and how it ends, without a card.

use super::*;

/// Which suites are measured when one of them fails, and what is left in the end.
fn after(suites: &[Suite], nixl: Option<&str>, fails: Suite) -> (Vec<Suite>, Results) {
    let (mut measured, mut results) = (vec![], Results::default());
    each(suites, nixl, &mut results, |suite, results| {
        measured.push(suite);
        if suite == fails {
            return Err("no memory is left on the card".into());
        }
        results.small = Some((10.0, 14.0));
        Ok(())
    });
    (measured, results)
}

#[test]
fn a_suite_that_fails_takes_nothing_from_the_others() {
    let path = std::env::temp_dir().join(format!("kvferry-gpu-{}.json", std::process::id()));
    for fails in ALL {
        let (measured, results) = after(&[], None, fails);
        assert_eq!(measured, ALL);
        let error = finish(&results, Some(&path), None).unwrap_err().to_string();
        let what = format!("{}: no memory is left on the card", fails.name());
        assert_eq!(error, format!("1 failed: {what}"));
        let saved: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(saved["small"], serde_json::json!([10.0, 14.0]));
        assert_eq!(saved["failures"], serde_json::json!([what]));
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn an_absent_nixl_fails_only_what_was_asked_for() {
    let why = Some("there is no NIXL here");
    let (measured, results) = after(&[], why, Suite::Packed);
    assert_eq!(measured, [Suite::Rows, Suite::Handoff, Suite::Beside]);
    let absent = [("packed over nixl".to_owned(), "there is no NIXL here".to_owned())];
    assert_eq!(results.outcome.absent, absent);
    finish(&results, None, None).unwrap();

    let (measured, results) = after(&[Suite::Packed, Suite::Rows], why, Suite::Packed);
    assert_eq!(measured, [Suite::Rows]);
    let error = finish(&results, None, None).unwrap_err().to_string();
    assert_eq!(error, "1 failed: packed over nixl: there is no NIXL here");
}
