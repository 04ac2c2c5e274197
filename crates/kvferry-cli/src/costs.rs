//! `kvferry plan --direct ... --packed ...`: what each way to read would take, and which is chosen.

use kvferry_plan::cost::{self, Choice, Way, Work};
use kvferry_plan::{Plan, Price, Rates};
use serde::Serialize;

use crate::failure::Failure;
use crate::report;
use crate::sides::Pair;
use crate::text::{self, Columns};

/// What a transport takes.
#[derive(Debug, clap::Args)]
pub(crate) struct RatesArgs {
    /// What reading takes, in nanoseconds: an operation, a copy, a byte. Shows what every way to read
    /// would take, and which is chosen. These are measured, as 'rates', by 'kvferry-bench lowering --json'
    /// for host memory and by 'kvferry-bench gpu --json' for a GPU's (rows: cuda; packed: nixl).
    #[arg(long, value_name = "LAUNCH,COPY,BYTE")]
    direct: Option<String>,
    /// What packing takes likewise; left out, the pair cannot pack.
    #[arg(long, value_name = "LAUNCH,RUN,BYTE", requires = "direct")]
    packed: Option<String>,
    /// The way to read that is chosen, as the option 'lowering' of a worker forces it: direct, packed or
    /// over-read; auto, unless given, is the cheapest.
    #[arg(long, value_name = "WAY", requires = "direct")]
    lowering: Option<Choice>,
}

impl RatesArgs {
    /// The rates, and who chooses by them.
    pub(crate) fn read(&self) -> Result<Option<(Rates, Choice)>, Failure> {
        let price = |name: &str, text: &str| {
            let numbers: Result<Vec<f64>, _> = text.split(',').map(str::parse::<f64>).collect();
            match numbers.as_deref() {
                Ok(&[launch, copy, byte])
                    if [launch, copy, byte].iter().all(|n| n.is_finite() && *n >= 0.0) =>
                {
                    Ok(Price { launch, copy, byte })
                }
                _ => Err(Failure::input(format!(
                    "--{name} {text}: give three numbers of nanoseconds, such as 10000,600,0.3"
                ))),
            }
        };
        let Some(direct) = &self.direct else { return Ok(None) };
        let packed = self.packed.as_deref().map(|text| price("packed", text)).transpose()?;
        let choice = self.lowering.unwrap_or_default();
        if choice == Choice::Only(Way::Packed) && packed.is_none() {
            return Err(Failure::input(
                "--lowering packed, but without --packed the pair cannot pack: add --packed LAUNCH,RUN,BYTE, or \
                 use --lowering direct",
            ));
        }
        Ok(Some((Rates { direct: price("direct", direct)?, packed }, choice)))
    }
}

/// What reading one group of a decode rank from one prefill rank takes, in milliseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    decode: String,
    prefill: String,
    group: String,
    copies: u64,
    bytes: u64,
    direct_ms: f64,
    over_read_ms: f64,
    /// `None` where the pair cannot.
    packed_ms: Option<f64>,
    chosen: &'static str,
}

/// All of them.
pub(crate) fn of(
    pair: &Pair,
    plans: &[Plan],
    rates: &Rates,
    choice: Choice,
) -> Result<Vec<Cost>, Failure> {
    let mut costs = vec![];
    // Forced, last blocks are read whole wherever that makes fewer copies, whatever it costs.
    let over_price = match choice {
        Choice::Only(Way::OverRead) => Price { launch: 0.0, copy: 1.0, byte: 0.0 },
        _ => rates.direct,
    };
    report::each_request(pair, plans, |rank, plan, request| {
        let exact = plan.transfer(request).map_err(Failure::input)?;
        let over = plan.over_read(request, &over_price).map_err(Failure::input)?;
        for (source, other) in pair.prefill.ranks.iter().enumerate() {
            let work = |group| Work {
                exact: exact.summary_of(source, group),
                over: Some(over.summary_of(source, group)),
            };
            let works: Vec<Work> = (0..exact.groups()).map(work).collect();
            let ways = cost::choose(rates, &works, choice);
            for ((work, way), group) in works.iter().zip(ways).zip(rank.groups()) {
                if work.exact.copies == 0 {
                    continue;
                }
                let takes = |way| cost::cost(rates, &[*work], &[way]).map(|time| time / 1e6);
                costs.push(Cost {
                    decode: rank.label().to_owned(),
                    prefill: other.label().to_owned(),
                    group: group.name.clone(),
                    copies: work.exact.copies,
                    bytes: work.exact.bytes,
                    direct_ms: takes(Way::Direct).unwrap_or(f64::NAN),
                    over_read_ms: takes(Way::OverRead).unwrap_or(f64::NAN),
                    packed_ms: takes(Way::Packed),
                    chosen: way.name(),
                });
            }
        }
        Ok(())
    })?;
    Ok(costs)
}

pub(crate) fn table(costs: &[Cost]) -> String {
    let heading = [
        "decode",
        "prefill",
        "group",
        ">copies",
        ">bytes",
        ">direct",
        ">over-read",
        ">packed",
        "chosen",
    ];
    let mut columns = Columns::new(&heading);
    let ms = |time: f64| format!("{time:.3} ms");
    for cost in costs {
        columns.row([
            cost.decode.clone(),
            cost.prefill.clone(),
            cost.group.clone(),
            text::number(cost.copies),
            text::bytes(cost.bytes),
            ms(cost.direct_ms),
            ms(cost.over_read_ms),
            cost.packed_ms.map_or_else(|| "-".to_owned(), ms),
            cost.chosen.to_owned(),
        ]);
    }
    format!("\n{}\n", columns.render())
}
