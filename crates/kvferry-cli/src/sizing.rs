//! What a request takes of the link between two engines, and how many requests fill it.

use serde::Serialize;

use crate::failure::Failure;
use crate::report::Answer;
use crate::sides::Pair;
use crate::tables;
use crate::text;

// Not a doc comment: it would take the place of the command's own.
// A link, and what goes over it.
#[derive(Debug, clap::Args)]
pub(crate) struct LinkArgs {
    /// Also size the link between the two engines: its rate, as in 100Gbit or 12.5GB (each second).
    #[arg(long, value_name = "RATE", value_parser = rate)]
    link: Option<u64>,
    /// Requests a second that the decode engine is to take, for --link.
    #[arg(long, value_name = "NUMBER", value_parser = positive, requires = "link")]
    requests: Option<f64>,
    /// Tokens of prompts that one prefill engine computes each second, for --link: says how many of them fill the link.
    #[arg(long, value_name = "TOKENS", value_parser = text::parse_number, requires = "link")]
    prefill_rate: Option<u64>,
}

/// What the link itself takes; no transport is faster.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Sizing {
    /// Bytes that the link carries each second.
    link_bytes_per_second: u64,
    /// Bytes that move for each token that was missing, with what does not grow with tokens.
    bytes_per_token: f64,
    /// Seconds that a request has the link to itself.
    seconds: f64,
    /// Requests a second that fill it.
    requests_per_second: f64,
    /// The prefill engine's blocks that one request pins until it has been read.
    blocks: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    asked: Option<Load>,
    /// Prefill engines for each decode engine that fill the link.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_engines: Option<f64>,
}

/// What a rate of requests needs.
#[derive(Debug, PartialEq, Serialize)]
struct Load {
    requests_per_second: f64,
    bytes_per_second: f64,
    /// Of what the link carries.
    share: f64,
    /// Blocks of prefill engines that are pinned at any time by what is on the link, if it keeps up.
    pinned_blocks: Option<f64>,
}

impl LinkArgs {
    /// Sizes a request, where a link is given and the pair works.
    pub(crate) fn size(&self, pair: &Pair, answer: &Answer) -> Result<Option<Sizing>, Failure> {
        let (Some(link), Answer::Works { report, .. }) = (self.link, answer) else {
            return Ok(None);
        };
        let missing = pair.asked.tokens - pair.asked.cached;
        if missing == 0 || report.bytes == 0 {
            return Err(Failure::input(
                "--link: this request moves nothing, which no link is sized by",
            ));
        }
        // All but the block that vLLM keeps for itself.
        let blocks = tables::blocks_needed(&pair.prefill.ranks[0], pair.asked.tokens) - 1;
        Ok(Some(Sizing::of(link, report.bytes, missing, blocks, self.requests, self.prefill_rate)))
    }
}

impl Sizing {
    fn of(
        link: u64,
        bytes: u64,
        tokens: u64,
        blocks: u64,
        requests: Option<f64>,
        prefill: Option<u64>,
    ) -> Self {
        let seconds = bytes as f64 / link as f64;
        let bytes_per_token = bytes as f64 / tokens as f64;
        let asked = requests.map(|rate| Load {
            requests_per_second: rate,
            bytes_per_second: rate * bytes as f64,
            share: rate * seconds,
            // As many are under way at any time as come in the time that one takes.
            pinned_blocks: (rate * seconds < 1.0).then_some(rate * seconds * blocks as f64),
        });
        Self {
            link_bytes_per_second: link,
            bytes_per_token,
            seconds,
            requests_per_second: seconds.recip(),
            blocks,
            asked,
            prefill_engines: prefill.map(|tokens| link as f64 / (tokens as f64 * bytes_per_token)),
        }
    }

    /// One fact a line.
    pub(crate) fn lines(&self) -> Vec<String> {
        let link = bits(self.link_bytes_per_second as f64);
        let mut lines = vec![
            format!(
                "{} at {link}: {} for each token that moves; transports take longer (docs/performance.md)",
                text::seconds(self.seconds),
                text::bytes(self.bytes_per_token.round() as u64)
            ),
            format!("full at {} such requests a second", text::figures(self.requests_per_second)),
            format!(
                "{} of prefill stay pinned until a request has been read",
                text::many(self.blocks, "block")
            ),
        ];
        if let Some(load) = &self.asked {
            let rate = text::figures(load.requests_per_second);
            let needed = bits(load.bytes_per_second);
            lines.push(match load.pinned_blocks {
                Some(blocks) => format!(
                    "{rate} requests a second need {needed}, {:.0} % of it, and keep at least {} blocks pinned",
                    100.0 * load.share,
                    text::figures(blocks)
                ),
                None => format!("{rate} requests a second need {needed}: more than it carries"),
            });
        }
        if let Some(engines) = self.prefill_engines {
            lines.push(format!(
                "{} prefill engines fill the link of one decode engine",
                text::figures(engines)
            ));
        }
        lines
    }
}

/// A rate as links are sold: in bits.
fn bits(bytes_per_second: f64) -> String {
    let (mut value, mut units) =
        (bytes_per_second * 8.0, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"].iter());
    let mut unit = units.next().expect("there are some");
    while value >= 999.5 {
        let Some(next) = units.next() else { break };
        (value, unit) = (value / 1000.0, next);
    }
    format!("{} {unit}", text::figures(value))
}

/// Bytes each second, of a rate as people write it.
fn rate(text: &str) -> Result<u64, String> {
    let problem = || "a rate is as in 100Gbit or 12.5GB".to_owned();
    let end = text.find(|letter: char| letter.is_ascii_alphabetic()).ok_or_else(problem)?;
    let (number, unit) = text.split_at(end);
    let number = positive(number.trim()).map_err(|_| problem())?;
    let unit = ["/s", "ps"].into_iter().find_map(|each| unit.strip_suffix(each)).unwrap_or(unit);
    let scale = match unit.chars().next() {
        Some('k' | 'K') => 1e3,
        Some('m' | 'M') => 1e6,
        Some('g' | 'G') => 1e9,
        Some('t' | 'T') => 1e12,
        _ => return Err(problem()),
    };
    let bytes = match &unit[1..] {
        // The small letter is the bit.
        "b" | "bit" | "Bit" | "bits" | "bE" => number * scale / 8.0,
        "B" | "Byte" | "byte" | "bytes" => number * scale,
        _ => return Err(problem()),
    };
    match bytes {
        bytes if (1.0..1e18).contains(&bytes) => Ok(bytes.round() as u64),
        _ => Err(problem()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number > 0.0 => Ok(number),
        _ => Err("not a positive number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_they_are_sold() {
        for (text, bytes) in [
            ("100Gbit", 12_500_000_000),
            ("100 Gbit/s", 12_500_000_000),
            ("100Gbps", 12_500_000_000),
            ("25GbE", 3_125_000_000),
            ("12.5GB", 12_500_000_000),
            ("12.5GB/s", 12_500_000_000),
            ("200Mbit", 25_000_000),
        ] {
            assert_eq!(rate(text), Ok(bytes), "{text}");
        }
        for text in ["100", "", "fast", "-1Gbit", "0Gbit", "1e400GB", "10Gig", "NaNGbit"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_link_is_full_when_its_requests_follow_each_other_without_a_gap() {
        // 2 GB of 8,000 tokens over 1 GB/s.
        let size =
            |requests| Sizing::of(1_000_000_000, 2_000_000_000, 8_000, 500, requests, Some(2_000));
        let sizing = size(Some(0.25));
        assert_eq!(
            (sizing.seconds, sizing.requests_per_second, sizing.bytes_per_token),
            (2.0, 0.5, 250e3)
        );
        let load = sizing.asked.as_ref().unwrap();
        assert_eq!(
            (load.bytes_per_second, load.share, load.pinned_blocks),
            (5e8, 0.5, Some(250.0))
        );
        // 2,000 tokens a second are 0.5 GB/s.
        assert_eq!(sizing.prefill_engines, Some(2.0));
        assert_eq!(size(Some(0.6)).asked.unwrap().pinned_blocks, None);
        assert_eq!(bits(12.5e9), "100 Gbit/s");
        assert_eq!(bits(1.0), "8 bit/s");
    }
}
