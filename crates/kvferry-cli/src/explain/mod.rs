//! `kvferry explain`: a page that shows where the bytes of one block lie and where they go.

mod frame;
mod ribbons;

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvferry_layout::Manifest;
use kvferry_plan::Plan;
use serde::Serialize;
use serde_json::{Value, json};

use self::frame::Frame;
use self::ribbons::Side;
use crate::failure::Failure;
use crate::output;
use crate::plan;
use crate::report::Answer;
use crate::sides::{Engine, Pair, PairArgs, name_parts};
use crate::sizing::LinkArgs;

/// The page, with a mark where each of its parts goes.
const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPTS: [&str; 5] = [
    include_str!("page/words.js"),
    include_str!("page/choice.js"),
    include_str!("page/block.js"),
    include_str!("page/copies.js"),
    include_str!("page/request.js"),
];

/// Draw a pair: write a page that shows a block of the pool, what every rank holds, and every copy of
/// one block.
///
/// The engines are named as for 'kvferry plan': by a model and two topologies, or by the manifests that
/// running servers dumped. The page is one file that needs no network.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pair: PairArgs,
    #[command(flatten)]
    link: LinkArgs,
    /// Where to write the page.
    #[arg(short, long, value_name = "FILE", default_value = "explain.html")]
    out: PathBuf,
    /// Print what was written as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let pair = args.pair.resolve()?;
    let answer = Answer::of(&pair)?;
    let Answer::Works { plans, report } = &answer else { return answer.end() };
    let picture = picture(&pair, plans).map_err(Failure::input)?;
    let sizing = args.link.size(&pair, &answer)?;
    let mut data = plan::as_json(&pair, &answer, sizing.as_ref());
    for (side, picture) in [("prefill", picture.prefill), ("decode", picture.decode)] {
        for (key, value) in [
            ("text", picture.text.into()),
            ("ranks", json!(picture.ranks)),
            ("frames", json!(picture.frames)),
        ] {
            data[side][key] = value;
        }
    }
    data["moves"] = picture.moves;
    data["transfer"]["text"] = report.against_minimum().into();
    let page = page(&data);
    std::fs::write(&args.out, &page)
        .map_err(|error| Failure::input(format!("--out {}: {error}", args.out.display())))?;
    output::print(&match args.json {
        true => format!("{:#}\n", json!({ "page": args.out, "bytes": page.len() })),
        false => format!("wrote {}: open it in a browser\n", args.out.display()),
    });
    Ok(())
}

/// The whole page.
fn page(data: &Value) -> String {
    // The data stands inside a script element: no `<` may appear in it.
    let data = data.to_string().replace('<', "\\u003c");
    PAGE.replace("/*STYLE*/", STYLE)
        .replace("/*SCRIPTS*/", &SCRIPTS.concat())
        // Last, so that nothing in it is taken for a mark.
        .replace("/*DATA*/", &data)
}

/// What the page draws, beside what `kvferry plan` says.
struct Picture {
    prefill: SidePicture,
    decode: SidePicture,
    /// For every decode rank and each of its groups: the copies of one block.
    moves: Value,
}

struct SidePicture {
    /// The engine in one line.
    text: String,
    ranks: Vec<RankPicture>,
    /// Each that a rank has, once.
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct RankPicture {
    label: String,
    /// Index of its frame.
    frame: usize,
    /// For every group, by a state's name in its layer: which part of it the rank holds.
    held: Vec<BTreeMap<String, Vec<HeldAxis>>>,
}

/// The part of an axis that a rank holds.
#[derive(Serialize)]
struct HeldAxis {
    axis: String,
    start: u64,
    end: u64,
    length: u64,
}

fn picture(pair: &Pair, plans: &[Plan]) -> Result<Picture, String> {
    let (prefill, decode) = (SidePicture::of(&pair.prefill)?, SidePicture::of(&pair.decode)?);
    let sources: Vec<Side<'_>> = prefill.sides(&pair.prefill).collect();
    let mut moves = vec![];
    for (target, plan) in decode.sides(&pair.decode).zip(plans) {
        let groups = 0..target.rank.groups().len();
        let groups = groups.map(|group| ribbons::one_block(plan, &sources, &target, group));
        moves.push(groups.collect::<Result<Vec<_>, _>>()?);
    }
    let moves = json!(moves);
    Ok(Picture { prefill, decode, moves })
}

impl SidePicture {
    fn of(engine: &Engine) -> Result<Self, String> {
        let mut frames: Vec<Frame> = vec![];
        let mut ranks = vec![];
        for rank in &engine.ranks {
            let frame = Frame::new(rank)?;
            let known = frames.iter().position(|known| *known == frame);
            let number = known.unwrap_or(frames.len());
            if known.is_none() {
                frames.push(frame);
            }
            ranks.push(RankPicture {
                label: rank.label().to_owned(),
                frame: number,
                held: held(rank),
            });
        }
        Ok(Self { text: plan::describe(engine), ranks, frames })
    }

    /// The engine's ranks with their frames.
    fn sides<'a>(&'a self, engine: &'a Engine) -> impl Iterator<Item = Side<'a>> {
        let ranks = engine.ranks.iter().zip(&self.ranks);
        ranks.map(|(rank, drawn)| Side { rank, frame: &self.frames[drawn.frame] })
    }
}

/// Which part of every state a rank holds.
fn held(rank: &Manifest) -> Vec<BTreeMap<String, Vec<HeldAxis>>> {
    let group = |group: &kvferry_layout::Group| {
        let mut states = BTreeMap::new();
        for piece in &group.pieces {
            let axes = rank.kind(piece).axes.iter().zip(&piece.bounds.0);
            let axes = axes.map(|(axis, span)| HeldAxis {
                axis: axis.name.clone(),
                start: span.start,
                end: span.end,
                length: axis.length,
            });
            let name = name_parts(&piece.state).1.to_owned();
            states.entry(name).or_insert_with(|| axes.collect());
        }
        states
    };
    rank.groups().iter().map(group).collect()
}
