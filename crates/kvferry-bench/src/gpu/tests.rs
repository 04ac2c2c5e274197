//! What a run keeps, and how it ends, without a card.

use super::*;

/// Which suites are measured when one of them fails, and what is left in the end.
fn after(suites: &[Suite], nixl: Option<&str>, fails: Suite) -> (Vec<Suite>, Results) {
    let (mut measured, mut results) = (vec![], Results::default());
    each(suites, nixl, None, &mut results, |suite, results| {
        measured.push(suite);
        if suite == fails {
            return Err("no memory is left on the card".into());
        }
        results.small = Some(10.0);
        Ok(())
    });
    (measured, results)
}

#[test]
fn a_suite_that_fails_takes_nothing_from_the_others() {
    let path = std::env::temp_dir().join(format!("kvferry-gpu-{}.json", std::process::id()));
    for fails in ALL {
        let (measured, mut results) = after(&[], None, fails);
        assert_eq!(measured, ALL);
        let error = finish(&mut results, Some(&path), None).unwrap_err().to_string();
        let what = format!("{}: no memory is left on the card", fails.name());
        assert_eq!(error, format!("1 failed: {what}"));
        let saved: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(saved["small"], serde_json::json!(10.0));
        assert_eq!(saved["failures"], serde_json::json!([what]));
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn an_absent_nixl_fails_only_what_was_asked_for() {
    let why = Some("there is no NIXL here");
    let (measured, mut results) = after(&[], why, Suite::Packed);
    assert_eq!(measured, [Suite::Rows, Suite::Tcp, Suite::Handoff, Suite::Beside]);
    let absent = [("packed over nixl".to_owned(), "there is no NIXL here".to_owned())];
    assert_eq!(results.outcome.absent, absent);
    finish(&mut results, None, None).unwrap();

    let (measured, mut results) = after(&[Suite::Packed, Suite::Rows], why, Suite::Packed);
    assert_eq!(measured, [Suite::Rows]);
    let error = finish(&mut results, None, None).unwrap_err().to_string();
    assert_eq!(error, "1 failed: packed over nixl: there is no NIXL here");
}

/// A run that is ended before its time leaves what was measured up to then.
#[test]
fn every_suite_is_saved_when_it_ends() {
    let path = std::env::temp_dir().join(format!("kvferry-gpu-each-{}.json", std::process::id()));
    let mut saved = vec![];
    each(&[], None, Some(&path), &mut Results::default(), |suite, results| {
        saved.extend(std::fs::read(&path).ok());
        results.card = suite.name().to_owned();
        Ok(())
    });
    std::fs::remove_file(path).unwrap();
    let card = |json: &Vec<u8>| -> String {
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        json["card"].as_str().unwrap().to_owned()
    };
    let cards: Vec<String> = saved.iter().map(card).collect();
    assert_eq!(cards, ALL[..ALL.len() - 1].iter().map(|suite| suite.name()).collect::<Vec<_>>());
}

/// Nor does a file that cannot be written hide what else is wrong.
#[test]
fn results_that_cannot_be_saved_are_one_failure() {
    let nowhere = std::env::temp_dir().join("no/such/folder.json");
    let mut results = Results::default();
    each(&[], None, Some(&nowhere), &mut results, |_, _| Err("no memory".into()));
    let error = finish(&mut results, Some(&nowhere), None).unwrap_err().to_string();
    assert!(error.starts_with("6 failed: rows: no memory; "), "{error}");
    assert!(error.contains("; results: --save ") && error.contains("folder.json: "), "{error}");
}
