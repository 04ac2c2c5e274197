//! Why two sides do not fit.

use kvferry_layout::{Axis, Format, Law, Phase, StateBox, Window, Writer};
use thiserror::Error;

/// A pair that is refused, before any byte could move: what differs, both values, what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The two sides do not serve the same thing.
    ///
    /// What to do: start both sides with the same model, revision and settings; the message names the one that
    /// differs.
    #[error(
        "'{fact}' differs: {} on the source ({source_rank}), {} on the destination. Start both \
         sides with the same model and settings.",
        stated(.source_value), stated(.destination_value)
    )]
    Identity {
        /// The fact: `model`, `revision`.
        fact: String,
        /// The source rank.
        source_rank: String,
        /// Its value; `None` when it does not say.
        source_value: Option<String>,
        /// The destination's value; `None` when it does not say.
        destination_value: Option<String>,
    },
    /// The elements differ.
    ///
    /// What to do: give both sides the same cache data type (`--kv-cache-dtype`, `--mamba-cache-dtype`), and
    /// a checkpoint with the same scales where these are named.
    #[error(
        "state '{state}': the source ({source_rank}) stores {source_format}, the destination \
         {destination_format}. Give both sides the same cache data type and scales."
    )]
    Format {
        /// The state.
        state: String,
        /// The source rank.
        source_rank: String,
        /// Its format.
        source_format: Format,
        /// The destination's format.
        destination_format: Format,
    },
    /// The format has the same name, and what writes it is not known to mean the same.
    ///
    /// What to do: start both sides with the same version of the engine, the same attention back end and the same
    /// switches. `KVFERRY_ASK=off` in one side's environment keeps its kernels from being asked what they write.
    #[error(
        "state '{state}': both sides call its elements {format}, but the source's ({source_rank}) are written by {}, \
         the destination's by {}. Start both sides with the same version and settings of the engine.",
        written(.source_writer), written(.destination_writer)
    )]
    Writer {
        /// The state.
        state: String,
        /// Its format.
        format: Format,
        /// The source rank.
        source_rank: String,
        /// What writes it there; `None` when it does not say.
        source_writer: Option<Box<Writer>>,
        /// What writes it on the destination; `None` when it does not say.
        destination_writer: Option<Box<Writer>>,
    },
    /// The axes differ.
    ///
    /// What to do: serve the same model on both sides: its heads or dimensions differ.
    #[error(
        "state '{state}': the source ({source_rank}) has axes {}, the destination {}. The two sides \
         run different models.",
        axes(.source_axes), axes(.destination_axes)
    )]
    Axes {
        /// The state.
        state: String,
        /// The source rank.
        source_rank: String,
        /// Its axes.
        source_axes: Vec<Axis>,
        /// The destination's axes.
        destination_axes: Vec<Axis>,
    },
    /// The numbers of entries differ.
    ///
    /// What to do: serve the same model on both sides: its rate of compression or its kind of state differs.
    #[error(
        "state '{state}': the source ({source_rank}) keeps {source_law}, the destination \
         {destination_law}. The two sides run different models."
    )]
    Law {
        /// The state.
        state: String,
        /// The source rank.
        source_rank: String,
        /// Its law.
        source_law: Law,
        /// The destination's law.
        destination_law: Law,
    },
    /// The source forgets what the destination needs.
    ///
    /// What to do: give the source at least the destination's window; where the destination keeps more than
    /// its model looks back at, let its manifest say so (`need`).
    #[error(
        "state '{state}': the source ({source_rank}) keeps {kept}, the destination needs {needed}. \
         Give the source at least the destination's window. Where the destination's model looks back \
         no further than the source keeps, turn prefix caching off there, or let its hybrid cache \
         allocator run."
    )]
    Window {
        /// The state.
        state: String,
        /// The source rank.
        source_rank: String,
        /// What it keeps.
        kept: Window,
        /// What the destination needs.
        needed: Window,
    },
    /// The ranks take turns at entries in too irregular a way.
    ///
    /// What to do: choose context-parallel sizes and interleaves that divide each other.
    #[error(
        "state '{state}': the turns of the ranks repeat only after more than {limit} entries (the \
         destination's are {destination_phase}). Choose context-parallel sizes that divide each other."
    )]
    Phase {
        /// The state.
        state: String,
        /// The destination's turn.
        destination_phase: Phase,
        /// The longest repetition that is compiled.
        limit: u64,
    },
    /// No source has the state.
    ///
    /// What to do: load the same layers on the source, and hand in the manifests of all of its ranks. Where
    /// the source keeps other states in its place, give both sides the same cache data type.
    #[error(
        "state '{state}': none of the {sources} source ranks holds it{}",
        missing(.format, .instead)
    )]
    Missing {
        /// The state.
        state: String,
        /// How the destination keeps it.
        format: Format,
        /// How many source ranks there are.
        sources: usize,
        /// What they keep of the same layer and the destination does not: names and formats.
        instead: Vec<(String, Format)>,
    },
    /// The sources together do not hold all of what the destination needs.
    ///
    /// What to do: hand in the manifests of all ranks of the source.
    #[error(
        "state '{state}': no source rank holds {part} of entries {phase}. Hand in the manifests of \
         all ranks of the source."
    )]
    Uncovered {
        /// The state.
        state: String,
        /// The first part that is not held.
        part: StateBox,
        /// For which entries.
        phase: Phase,
    },
    /// Too many boxes have to be held against each other.
    ///
    /// What to do: describe a rank's part of a state as one piece, and choose context-parallel sizes that divide
    /// each other.
    #[error(
        "state '{state}': the two sides hold it in too many parts, or in turns that do not line up: the \
         plan is not found within {limit} steps. Describe a rank's part of a state as one piece, and \
         choose context-parallel sizes that divide each other."
    )]
    TooComplex {
        /// The state at which the search gave up.
        state: String,
        /// The steps allowed.
        limit: u64,
    },
    /// A fault in the compiler, found by the proof that follows it.
    ///
    /// What to do: report it, with both manifests. Nothing was copied.
    #[error(
        "state '{state}': the plan could not be proven: {problem}. This is a fault in kvferry; please report it."
    )]
    Unproven {
        /// The state.
        state: String,
        /// What does not hold.
        problem: String,
    },
}

impl Incompatible {
    /// Which error it is, in one word that stays the same from release to release.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Identity { .. } => "identity",
            Self::Format { .. } => "format",
            Self::Writer { .. } => "writer",
            Self::Axes { .. } => "axes",
            Self::Law { .. } => "law",
            Self::Window { .. } => "window",
            Self::Phase { .. } => "phase",
            Self::Missing { .. } => "missing",
            Self::Uncovered { .. } => "uncovered",
            Self::TooComplex { .. } => "too_complex",
            Self::Unproven { .. } => "unproven",
        }
    }

    /// The state that it is about; `None` where it is about the engines as a whole.
    pub fn state(&self) -> Option<&str> {
        match self {
            Self::Identity { .. } => None,
            Self::Format { state, .. }
            | Self::Writer { state, .. }
            | Self::Axes { state, .. }
            | Self::Law { state, .. }
            | Self::Window { state, .. }
            | Self::Phase { state, .. }
            | Self::Missing { state, .. }
            | Self::Uncovered { state, .. }
            | Self::TooComplex { state, .. }
            | Self::Unproven { state, .. } => Some(state),
        }
    }
}

fn stated(value: &Option<String>) -> String {
    value.as_ref().map_or_else(|| "not stated".to_owned(), |value| format!("'{value}'"))
}

fn written(writer: &Option<Box<Writer>>) -> String {
    writer.as_ref().map_or_else(|| "what it does not say".to_owned(), ToString::to_string)
}

fn missing(format: &Format, instead: &[(String, Format)]) -> String {
    if instead.is_empty() {
        return ". Load the same layers on the source, and hand in the manifests of all its ranks."
            .to_owned();
    }
    let instead: Vec<_> =
        instead.iter().map(|(state, format)| format!("'{state}' as {format}")).collect();
    format!(
        ": the destination keeps it as {format}, the source keeps {} instead. Give both sides the same \
         cache data type.",
        instead.join(" and ")
    )
}

fn axes(axes: &[Axis]) -> String {
    let axes: Vec<String> = axes.iter().map(Axis::to_string).collect();
    format!("({})", axes.join(", "))
}
