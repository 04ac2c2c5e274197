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

/// Why a draft is not a manifest, or why bytes do not decode to one. Every message names the place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// A region is empty or wraps around the address space.
    ///
    /// What to do: state the address and the length of memory that is really allocated.
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
    ///
    /// What to do: register each span of memory once, and let several pieces name its region.
    #[error("regions {first} and {second} overlap: register each span of memory once")]
    RegionsOverlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A kind of state makes no sense.
    ///
    /// What to do: correct the format, the axes or the law that the message names.
    #[error("kind {kind}: {problem}")]
    Kind {
        /// The kind.
        kind: usize,
        /// What is wrong.
        problem: String,
    },
    /// A group makes no sense.
    ///
    /// What to do: correct the blocks, the tokens per block, the window or the null block of this group.
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
    ///
    /// What to do: add the kind or the region to the manifest, or name one that is there.
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
    ///
    /// What to do: give the box a range within the axis's length, which counts the whole model and not one
    /// rank's part.
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
    ///
    /// What to do: state one range and one stride for every axis of the state.
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
    ///
    /// What to do: use one kind for all pieces of a state; if they differ in more than place, they are two
    /// states and need two names.
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
    ///
    /// What to do: give the phase a range that is not empty and ends at the modulus or before it.
    #[error("{spot}: phase {phase} holds nothing or more than its modulus")]
    Phase {
        /// The piece.
        spot: Box<Spot>,
        /// The phase.
        phase: String,
    },
    /// A piece needs tokens that its group does not keep.
    ///
    /// What to do: leave `need` out, or state a window that the group's own window covers.
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
    ///
    /// What to do: choose tokens per block, kernel blocks and context-parallel turns that divide each other.
    #[error("{spot}: {problem}")]
    EntriesPerBlock {
        /// The piece.
        spot: Box<Spot>,
        /// What does not divide.
        problem: String,
    },
    /// Scratch without a byte.
    ///
    /// What to do: leave this scratch out, or state at least one byte a run and one repetition a dimension.
    #[error(
        "{spot}: the scratch is empty: {}",
        match .dimension {
            Some(dimension) => format!("its dimension {dimension} has no repetition"),
            None => "its runs have no byte".to_owned(),
        }
    )]
    ScratchEmpty {
        /// The scratch.
        spot: Box<Spot>,
        /// The dimension that has no repetition; `None` where the runs have no byte.
        dimension: Option<usize>,
    },
    /// Scratch with too many dimensions.
    ///
    /// What to do: describe the scratch as several with fewer dimensions each.
    #[error("{spot}: the scratch has {found} dimensions, at most {limit} are allowed")]
    ScratchDimensions {
        /// The scratch.
        spot: Box<Spot>,
        /// Its dimensions.
        found: usize,
        /// The most that are allowed.
        limit: usize,
    },
    /// Two elements of one view share a byte.
    ///
    /// What to do: check the strides and the counts of this piece: a stride must be at least as long as what
    /// repeats at it.
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
    ///
    /// What to do: check the strides and the counts of this piece: one of them is far too large.
    #[error("{spot}: its extent does not fit in 64 bits")]
    Overflow {
        /// The piece.
        spot: Box<Spot>,
    },
    /// A view reaches past the end of its region.
    ///
    /// What to do: register the whole tensor as a region, or correct the offset, the strides or the number of
    /// blocks.
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
    ///
    /// What to do: check the offsets of the two: in one block every byte belongs to one piece at most.
    #[error("{first} and {second} lie on the same bytes of one group")]
    PiecesOverlap {
        /// One of them.
        first: Box<Spot>,
        /// The other.
        second: Box<Spot>,
    },
    /// Two groups share bytes under different block ids.
    ///
    /// What to do: let groups that share memory have the same bytes in each block, or give them memory of
    /// their own.
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
    ///
    /// What to do: describe the memory with fewer pieces, or with strides that are multiples of each other.
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
    ///
    /// What to do: describe each rank by a manifest of its own, and a rank's part of a state as one piece.
    #[error("the manifest has {bytes} bytes, at most {limit} are allowed")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not a manifest, or one of another version.
    ///
    /// What to do: run the same kvferry release on both sides; write the manifest again with this one.
    #[error("{found}; this build reads manifest version {known}")]
    Version {
        /// What was found instead.
        found: String,
        /// The version that is understood.
        known: u16,
    },
    /// The bytes or the JSON do not parse.
    ///
    /// What to do: correct the field that the message names, or send the manifest again: it was cut or changed
    /// on its way.
    #[error("the manifest does not decode: {problem}")]
    Decode {
        /// The decoder's message.
        problem: String,
    },
}

impl ManifestError {
    /// Which error it is, in one word that stays the same from release to release.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::RegionBounds { .. } => "region_bounds",
            Self::RegionsOverlap { .. } => "regions_overlap",
            Self::Kind { .. } => "kind",
            Self::Group { .. } => "group",
            Self::NoSuch { .. } => "no_such",
            Self::BoxOutsideState { .. } => "box_outside_state",
            Self::AxisCount { .. } => "axis_count",
            Self::StateOfTwoKinds { .. } => "state_of_two_kinds",
            Self::Phase { .. } => "phase",
            Self::Need { .. } => "need",
            Self::EntriesPerBlock { .. } => "entries_per_block",
            Self::ScratchEmpty { .. } => "scratch_empty",
            Self::ScratchDimensions { .. } => "scratch_dimensions",
            Self::StridesOverlap { .. } => "strides_overlap",
            Self::Overflow { .. } => "overflow",
            Self::ViewOutsideRegion { .. } => "view_outside_region",
            Self::PiecesOverlap { .. } => "pieces_overlap",
            Self::UnsoundOverlay { .. } => "unsound_overlay",
            Self::TooComplex { .. } => "too_complex",
            Self::TooLarge { .. } => "too_large",
            Self::Version { .. } => "version",
            Self::Decode { .. } => "decode",
        }
    }
}
