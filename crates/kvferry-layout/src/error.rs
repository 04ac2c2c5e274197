//! What can be wrong with a manifest.

use std::fmt;

use thiserror::Error;

use crate::window::Window;

/// Which piece or scratch of which group an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Index of the group.
    pub group: usize,
    /// The group's name.
    pub group_name: String,
    /// What it is: `piece 3`, `scratch 0`.
    pub item: String,
    /// The piece's state; empty for scratch.
    pub state: String,
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group {} '{}', {}", self.group, self.group_name, self.item)?;
        if !self.state.is_empty() {
            write!(f, " '{}'", self.state)?;
        }
        Ok(())
    }
}

/// Why a draft is no manifest, or bytes do not decode to one. Every message names the place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// A region is empty or wraps around the address space.
    #[error(
        "region {region}: {bytes} bytes at {base:#x} are empty or pass the end of the address space"
    )]
    RegionBounds {
        /// The region.
        region: usize,
        /// Its address.
        base: u64,
        /// Its length.
        bytes: u64,
    },
    /// Two regions share memory.
    #[error("regions {first} and {second} overlap: register each span of memory once")]
    RegionsOverlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A kind of state makes no sense.
    #[error("kind {kind}: {problem}")]
    Kind {
        /// The kind.
        kind: usize,
        /// What is wrong.
        problem: String,
    },
    /// A group makes no sense.
    #[error("group {group} '{name}': {problem}")]
    Group {
        /// The group.
        group: usize,
        /// Its name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A piece names a kind or region that is not there.
    #[error("{spot}: there is no {what} {index}; the manifest has {count}")]
    NoSuch {
        /// The piece.
        spot: Box<Spot>,
        /// `kind` or `region`.
        what: &'static str,
        /// The index it names.
        index: u32,
        /// How many there are.
        count: usize,
    },
    /// A box has a range that is empty or outside its state.
    #[error("{spot}: the box holds {held} of axis '{axis}', which has 0..{length}")]
    BoxOutsideState {
        /// The piece.
        spot: Box<Spot>,
        /// The axis.
        axis: String,
        /// The range.
        held: String,
        /// The axis's length.
        length: u64,
    },
    /// A box or view has another number of axes than its state.
    #[error("{spot}: the {what} has {found} axes, its state has {expected}")]
    AxisCount {
        /// The piece.
        spot: Box<Spot>,
        /// `box` or `view`.
        what: &'static str,
        /// Its axes.
        found: usize,
        /// The state's axes.
        expected: usize,
    },
    /// One state, two kinds.
    #[error("{spot}: the state is of kind {found} here and of kind {other} in another piece")]
    StateOfTwoKinds {
        /// The piece.
        spot: Box<Spot>,
        /// Its kind.
        found: u32,
        /// The other piece's.
        other: u32,
    },
    /// A phase is empty or outside its modulus.
    #[error("{spot}: phase {phase} holds nothing or more than its modulus")]
    Phase {
        /// The piece.
        spot: Box<Spot>,
        /// The phase.
        phase: String,
    },
    /// A piece needs tokens that its group does not keep.
    #[error("{spot}: the piece needs {needed}, but its group keeps only {kept}")]
    Need {
        /// The piece.
        spot: Box<Spot>,
        /// What it needs.
        needed: Window,
        /// What its group keeps.
        kept: Window,
    },
    /// A block does not hold a whole number of the piece's entries.
    #[error("{spot}: {problem}")]
    EntriesPerBlock {
        /// The piece.
        spot: Box<Spot>,
        /// What does not divide.
        problem: String,
    },
    /// Two elements of one view share a byte.
    #[error(
        "{spot}: its strides overlap themselves: {stride} bytes apart, but {extent} bytes long"
    )]
    StridesOverlap {
        /// The piece.
        spot: Box<Spot>,
        /// The stride that is too short.
        stride: u64,
        /// What has to fit in it.
        extent: u64,
    },
    /// A number does not fit in 64 bits.
    #[error("{spot}: its extent does not fit in 64 bits")]
    Overflow {
        /// The piece.
        spot: Box<Spot>,
    },
    /// A view reaches past the end of its region.
    #[error("{spot}: the view ends at byte {end} of region {region}, which has {bytes}")]
    ViewOutsideRegion {
        /// The piece.
        spot: Box<Spot>,
        /// The region.
        region: u32,
        /// First byte after the view.
        end: u64,
        /// The region's length.
        bytes: u64,
    },
    /// Two pieces of one group lie on the same bytes.
    #[error("{first} and {second} lie on the same bytes of one group")]
    PiecesOverlap {
        /// One of them.
        first: Box<Spot>,
        /// The other.
        second: Box<Spot>,
    },
    /// Two groups share bytes under different block ids.
    #[error(
        "{first} and {second} share bytes that belong to different blocks in the two groups: a block of one would destroy another block of the other"
    )]
    UnsoundOverlay {
        /// One of them.
        first: Box<Spot>,
        /// The other.
        second: Box<Spot>,
    },
    /// The strides are too irregular to decide whether pieces overlap.
    #[error(
        "{spot}: cannot prove within {steps} steps that no two pieces overlap: the strides are too irregular"
    )]
    TooComplex {
        /// The piece at which the search gave up.
        spot: Box<Spot>,
        /// The steps allowed.
        steps: u64,
    },
    /// The encoded manifest is larger than allowed.
    #[error("the manifest has {bytes} bytes, at most {limit} are allowed")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not a manifest, or one of another version.
    #[error("{found}; this build reads manifest version {known}")]
    Version {
        /// What was found instead.
        found: String,
        /// The version that is understood.
        known: u16,
    },
    /// The bytes or the JSON do not parse.
    #[error("the manifest does not decode: {problem}")]
    Decode {
        /// The decoder's message.
        problem: String,
    },
}
