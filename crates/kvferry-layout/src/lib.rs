//! Describe a rank's cache by facts.
//!
//! A serving engine's memory of a prompt is a set of *states*: logical tensors, free of any
//! parallelism. A rank holds a *box* of each state, and a *view* says at which bytes. All the facts of
//! one rank are its [`Manifest`]. Two manifests are all that is needed to move a request between two
//! ranks, whatever the engines, the parallelism, the block sizes and the layouts: that is the work of
//! `kvferry-plan`.
//!
//! A manifest starts as a [`Draft`], plain data that an adapter fills in, and becomes a [`Manifest`]
//! only through [`Manifest::new`], which checks every fact and names the piece that is wrong.
//!
//! ```
//! use kvferry_layout::*;
//!
//! // One layer of a model with 8 heads of 64 numbers. This rank is the second of two: it holds heads
//! // 4 to 8. K and V of a token lie side by side, a block holds 16 tokens, the pool 1000 blocks.
//! let kv = Kind {
//!     format: Format::new("bf16", 2),
//!     axes: vec![Axis::new("head", 8), Axis::new("dim", 64)],
//!     law: Law::PER_TOKEN,
//! };
//! let (heads, dim, tokens, blocks) = (4, 64, 16, 1000);
//! let row = 2 * dim * 2; // K and V of one head and token, in bytes
//! let view = |offset| View {
//!     region: 0,
//!     offset,
//!     block: heads * tokens * row,
//!     kernel: None,
//!     entry: heads * row,
//!     axes: vec![row, 2],
//! };
//! let piece = |name: &str, offset| Piece {
//!     state: name.to_owned(),
//!     kind: 0,
//!     bounds: StateBox::new([4..8, 0..64]),
//!     phase: Phase::ALL,
//!     need: None,
//!     view: view(offset),
//! };
//! let draft = Draft {
//!     identity: [("model".to_owned(), "example".to_owned())].into(),
//!     engine: "decode".to_owned(),
//!     rank: 1,
//!     label: "tp1".to_owned(),
//!     regions: vec![Region { base: 0x7000_0000, bytes: blocks * heads * tokens * row, place: Place::Host }],
//!     kinds: vec![kv],
//!     writers: Default::default(),
//!     groups: vec![Group {
//!         name: "attention".to_owned(),
//!         blocks: 1000,
//!         null_block: Some(0),
//!         tokens_per_block: Some(16),
//!         window: Window::FULL,
//!         pieces: vec![piece("layers.0/k", 0), piece("layers.0/v", dim * 2)],
//!         scratch: vec![],
//!     }],
//! };
//! let manifest = Manifest::new(draft)?;
//! assert_eq!(Manifest::from_bytes(&manifest.to_bytes())?, manifest);
//! # Ok::<(), ManifestError>(())
//! ```

#![forbid(unsafe_code)]

pub mod arithmetic;
pub mod strided;

mod check;
mod codec;
mod copy;
mod draft;
mod error;
mod loops;
mod manifest;
mod packed;
mod state;
mod view;
mod window;

pub use codec::{MAX_BINARY_BYTES, MAX_JSON_BYTES};
pub use copy::ByteCopy;
pub use draft::{Draft, Group, Piece, Scratch};
pub use error::{ManifestError, Spot};
pub use loops::{BlockPair, Loop, LoopNest, Loops, LoopsError, MAX_LOOPS};
pub use manifest::Manifest;
pub use packed::{CutLimits, Cutting};
pub use state::{Axis, Format, Kind, Law, Phase, Span, StateBox, Writer};
pub use view::{Kernel, MAX_AXES, Place, Region, View};
pub use window::Window;
