//! Compile what one destination rank must copy from the ranks of another engine, prove it, and say what a
//! request copies.
//!
//! [`Plan::compile`] intersects the destination's [`Manifest`](kvferry_layout::Manifest) with those of
//! the sources, once per pair of engines. It answers with a plan that is proven (every needed element
//! exactly once, from a rank that holds it), or with the reason why the pair does not fit
//! ([`Incompatible`]). [`Plan::transfer`] takes one request's block tables and checks them;
//! [`Transfer::loops`] says what is read from each source rank, and [`Transfer::rest`] what is left of
//! the request's own blocks.
//!
//! ```
//! # use kvferry_layout::*;
//! use kvferry_plan::{ByteCopy, Plan, Request, Table};
//!
//! // Two engines hold `heads` of one layer's four heads, 8 bytes each, in blocks of `tokens` tokens.
//! let rank = |engine: &str, heads: std::ops::Range<u64>, tokens: u64, base: u64| {
//!     let row = (heads.end - heads.start) * 8;
//!     Manifest::new(Draft {
//!         engine: engine.to_owned(),
//!         regions: vec![Region { base, bytes: 10 * tokens * row, place: Place::Host }],
//!         kinds: vec![Kind {
//!             format: Format::new("opaque", 8),
//!             axes: vec![Axis::new("head", 4)],
//!             law: Law::PER_TOKEN,
//!         }],
//!         groups: vec![Group {
//!             name: "attention".to_owned(),
//!             blocks: 10,
//!             null_block: Some(0),
//!             tokens_per_block: Some(tokens),
//!             window: Window::FULL,
//!             pieces: vec![Piece {
//!                 state: "layers.0/kv".to_owned(),
//!                 kind: 0,
//!                 bounds: StateBox::new([heads]),
//!                 phase: Phase::ALL,
//!                 need: None,
//!                 view: View {
//!                     region: 0,
//!                     offset: 0,
//!                     block: tokens * row,
//!                     kernel: None,
//!                     entry: row,
//!                     axes: vec![8],
//!                 },
//!             }],
//!             scratch: vec![],
//!         }],
//!         ..Draft::default()
//!     })
//! };
//! // One prefill rank with all heads and blocks of 4 tokens; a decode rank with heads 2 and 3 and
//! // blocks of 16.
//! let prefill = rank("prefill", 0..4, 4, 0x1000)?;
//! let decode = rank("decode", 2..4, 16, 0x9000)?;
//! let plan = Plan::compile(&decode, &[&prefill])?;
//!
//! // A request of 2 tokens: in block 7 of prefill, to go to block 3 of decode.
//! let request = Request {
//!     tokens: 2,
//!     cached: &[0],
//!     source: &[Table::new(&[7])],
//!     destination: &[Table::new(&[3])],
//! };
//! let transfer = plan.transfer(&request)?;
//! let (from, to) = (0x1000 + 7 * 4 * 32 + 16, 0x9000 + 3 * 16 * 16);
//! let copies: Vec<ByteCopy> = transfer.loops(0)?.copies().collect();
//! assert_eq!(
//!     copies,
//!     [
//!         ByteCopy { source: from, destination: to, bytes: 16 },
//!         ByteCopy { source: from + 32, destination: to + 16, bytes: 16 },
//!     ]
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A map
//!
//! The words inside, in the order in which a pair of engines and then a request meets them.
//!
//! Compiling (`compile`), once per pair:
//!
//! | word | meaning |
//! |---|---|
//! | part | what one source piece gives to one destination piece: a box of every entry ([`Part`], `cover`) |
//! | budget | how much work may be spent on finding and proving parts |
//! | window | the tokens of a destination piece that are copied: what its group keeps or, where the source keeps less, what the piece needs |
//! | nest | a part's bytes of one entry: loops (count, stride on each side) around one run, and the steps to other entries, kernel blocks and blocks (`nest`) |
//! | pairing | how a part's entries follow each other on both sides: law, phase and the two block layouts; nests of one pairing share segments (`walk`) |
//! | block layout | how one side's blocks hold a piece's entries: how many, how many of them evenly spaced, which of all |
//! | merged nest | nests that continue each other, or repeat each other evenly (layer by layer), as one (`merge`) |
//! | unwritten | what of the destination's own pieces and scratch a request may leave unwritten; nests too |
//! | series | a set of (source byte, destination byte) pairs as a number, by which merged nests are proven to be the parts |
//!
//! Serving (`request`, `check`, `transfer`), for each request:
//!
//! | word | meaning |
//! |---|---|
//! | table | the block ids of one group, by position ([`Table`]; owned: [`BlockTable`]) |
//! | entries | which entries of a state are held already, and which are to be copied |
//! | growth | which groups can be read part by part while the source computes, and in which steps ([`Growth`]) |
//! | layer | states that are complete together while the source computes ([`LayerPlan`]) |
//! | slot | a place in one side's blocks: block, kernel block, entry |
//! | segment | a stretch of entries that lie evenly on both sides, and repeat evenly; tables become segments |
//! | shape | what of a segment does not depend on its blocks: where in them it starts, how many entries, which steps |
//! | fit | a nest made ready for one shape: loops and run, as few and as long as they get (`loops`) |
//!
//! Beside these, [`lowering`] says what of it is read packed, by how long its runs are.
//!
//! Nothing here looks at what kind of layer a state belongs to, nor at the two sides' parallelism: a
//! plan is made of boxes, strides and block tables alone.

#![forbid(unsafe_code)]

mod check;
mod compile;
mod growth;
mod incompatible;
mod layers;
mod loops;
pub mod lowering;
mod nest;
mod request;
mod summary;
mod transfer;
mod walk;

pub use compile::{Part, Plan, Spread};
pub use growth::Growth;
pub use incompatible::Incompatible;
pub use kvferry_layout::{ByteCopy, Loops, LoopsError};
pub use layers::{Layer, LayerPlan};
pub use request::{BlockTable, Request, RequestError, Side, Table};
pub use summary::{Area, Summary};
pub use transfer::Transfer;
