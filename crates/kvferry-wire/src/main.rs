//! `kvferry-wire [MTU]` makes the hosts and says, in one line of JSON, how to enter them; each further line of
//! its standard input is a weather, answered with `ok` or what is wrong with it. It ends with its input.

use std::io::{BufRead, Write};
use std::process::ExitCode;

use kvferry_wire::{Error, Wire};
use serde_json::json;

fn main() -> ExitCode {
    let mtu = match std::env::args().nth(1).map_or(Ok(1500), |mtu| mtu.parse()) {
        Ok(mtu) => mtu,
        Err(error) => return failed(&format!("the size of packets: {error}")),
    };
    let wire = match Wire::lay(mtu) {
        Ok(wire) => wire,
        Err(error) => return failed(&error.to_string()),
    };
    let [left, right, third] = [&wire.left, &wire.right, &wire.third]
        .map(|host| json!({"netns": host.path(), "address": host.address.to_string()}));
    say(&json!({"left": left, "right": right, "third": third}).to_string());
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let set = serde_json::from_str(&line)
            .map_err(|error| error.to_string())
            .and_then(|weather| wire.set(weather).map_err(|error: Error| error.to_string()));
        say(set.err().as_deref().unwrap_or("ok"));
    }
    ExitCode::SUCCESS
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Whoever does not listen need not be told.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn failed(why: &str) -> ExitCode {
    eprintln!("kvferry-wire: {why}");
    ExitCode::FAILURE
}
