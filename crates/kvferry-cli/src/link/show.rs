//! A report for people.

use std::collections::BTreeSet;

use super::verdict::gigabits;
use super::words::{Came, End, Finding, Host, Measured, Path, Report, Sent, Step};
use crate::text::{self, Columns};

pub(super) fn told(report: &Report) -> String {
    let Path { mtu, segment, round_trip_us } = report.path;
    let mut out = format!(
        "tester     {}\nlistener   {}\npath       packets of at most {mtu} bytes ({segment} of them content), round trip {}\n\n",
        said_of(&report.tester),
        said_of(&report.listener),
        text::seconds(f64::from(round_trip_us) / 1e6),
    );
    let mut table = Columns::new(&["", ">tester reads", ">listener reads"]);
    for one in report.measured.iter().filter(|one| one.step.reader == End::Tester) {
        let other = |step: &Step| step.reader == End::Listener && step.what == one.step.what;
        let other = report.measured.iter().find(|one| other(&one.step)).map(|one| cell(&one.came));
        table.row([plain(&one.step.what.to_string()), cell(&one.came), other.unwrap_or_default()]);
    }
    let again = |sent: Sent| {
        format!("{} of {}", text::number(sent.retransmitted), text::number(sent.segments))
    };
    // What is read by one end was sent by the other.
    table.row([
        "packets sent again".to_owned(),
        again(report.sent_by_listener),
        again(report.sent_by_tester),
    ]);
    out += &table.render();
    out.push('\n');
    for left_out in &report.left_out {
        out += &format!("left out  {}\n", plain(left_out));
    }
    for Measured { step, came } in &report.measured {
        if let Came::LeftOut(why) = came {
            let reader = report.host(step.reader).address;
            let what = plain(&step.what.to_string());
            out += &format!("left out  {what}, read by {reader}: {}\n", plain(why));
        }
    }
    for Finding { wrong, says, advice, .. } in &report.findings {
        let word = if *wrong { "WRONG" } else { "note " };
        out += &format!("{word}  {}\n       What to do: {}\n", plain(says), plain(advice));
    }
    let wrong: BTreeSet<&str> =
        report.findings.iter().filter(|one| one.wrong).map(|one| &*one.what).collect();
    out += &match wrong.is_empty() {
        true => "the link is fine: every byte was right\n".to_owned(),
        false => format!("the link is not fine: {}\n", plain(&Vec::from_iter(wrong).join(", "))),
    };
    out
}

fn said_of(host: &Host) -> String {
    let interface = host.interface.as_ref().map(|interface| {
        let speed = interface.megabits.map_or("speed unknown".to_owned(), gigabits);
        format!(" ({}, {speed})", plain(&interface.name))
    });
    format!("{}{}, memory: {}", host.address, interface.unwrap_or_default(), plain(&host.memory))
}

fn cell(came: &Came) -> String {
    match came {
        Came::Bytes { gb_per_s, packed, .. } => {
            format!("{}{} GB/s", if *packed { "packed " } else { "" }, text::figures(*gb_per_s))
        }
        Came::Trips { median_us, worst_us, .. } => {
            format!("{}, worst {}", text::seconds(median_us / 1e6), text::seconds(worst_us / 1e6))
        }
        Came::LeftOut(_) => "left out".to_owned(),
        Came::Unreachable { .. } => "not reached".to_owned(),
        Came::Failed(_) => "failed".to_owned(),
        Came::Corrupt { .. } => "WRONG BYTES".to_owned(),
    }
}

/// The other end's words come from another host: no control characters for a terminal.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}
