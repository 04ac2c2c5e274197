//! Finds, for every way in which pairs fail, the smallest of many drawn pairs that fails so.
//!
//! `cargo run -p kvferry-testkit --example hunt -- 20000`

use std::collections::BTreeMap;
use std::panic::catch_unwind;

use kvferry_testkit::drive::Drawn;

fn main() {
    let cases: u64 = std::env::args().nth(1).map_or(5000, |cases| cases.parse().expect("a number"));
    let first: u64 = std::env::args().nth(2).map_or(0, |first| first.parse().expect("a number"));
    std::panic::set_hook(Box::new(|_| {}));
    // The problem without its numbers, how often it was met, and the shortest telling of it.
    let mut problems: BTreeMap<String, (u64, String)> = BTreeMap::new();
    for seed in first..first + cases {
        let Ok(drawn) = catch_unwind(|| Drawn::new(seed)) else {
            println!("seed {seed}: drawing panics");
            continue;
        };
        let problem = match catch_unwind(|| drawn.judge(3)) {
            Ok(Ok(_)) => continue,
            Ok(Err(problem)) => problem,
            Err(panic) => {
                let message = panic.downcast_ref::<String>().cloned();
                let literal = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                format!("seed {seed}: panic: {:?}", message.or(literal))
            }
        };
        let first_line = problem.lines().next().unwrap_or_default();
        let kind: String = first_line.chars().filter(|c| !c.is_ascii_hexdigit()).collect();
        let telling = format!("{drawn}{problem}");
        let found = problems.entry(kind).or_insert_with(|| (0, telling.clone()));
        found.0 += 1;
        if telling.len() < found.1.len() {
            found.1 = telling;
        }
    }
    for (times, telling) in problems.values() {
        println!("{times} times:\n{telling}\n");
    }
    println!("{} ways to fail in {cases} pairs", problems.len());
}
