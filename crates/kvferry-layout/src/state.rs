//! States, free of parallelism, and the boxes of them that ranks hold.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What one element of a state is: plain numbers (`bf16`), or an opaque record (a quantised token with
/// its scales). Two sides fit only when both name and size are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Format {
    /// The format's name; equal names mean equal encodings.
    pub name: String,
    /// Bytes of one element.
    pub bytes: u32,
}

impl Format {
    /// A format of `bytes` bytes an element.
    pub fn new(name: impl Into<String>, bytes: u32) -> Self {
        Self { name: name.into(), bytes }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.bytes)
    }
}

/// One axis of a state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// What runs along the axis: `head`, `dim`, `channel`, `column`.
    pub name: String,
    /// How many there are in the whole model.
    pub length: u64,
}

impl Axis {
    /// An axis of `length` elements.
    pub fn new(name: impl Into<String>, length: u64) -> Self {
        Self { name: name.into(), length }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.length)
    }
}

/// How many entries a state has after `n` tokens: `floor(n * entries / tokens)` closed entries, which
/// later tokens never change, followed by `open` entries, which every token may rewrite.
///
/// A key has one closed entry a token, a state compressed by four has one in four tokens, and a
/// recurrent state is a single open entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Law {
    /// Closed entries gained in every `tokens` tokens.
    pub entries: u32,
    /// See `entries`; never zero.
    pub tokens: u32,
    /// Entries after the closed ones that are still being written.
    pub open: u32,
}

impl Law {
    /// One entry for each token.
    pub const PER_TOKEN: Self = Self::every(1);
    /// One entry for the whole sequence, rewritten by every token.
    pub const SNAPSHOT: Self = Self { entries: 0, tokens: 1, open: 1 };

    /// One entry for every `tokens` tokens.
    pub const fn every(tokens: u32) -> Self {
        Self { entries: 1, tokens, open: 0 }
    }

    /// Entries that `n` tokens have closed. Saturates.
    pub fn closed(&self, n: u64) -> u64 {
        let closed = u128::from(n) * u128::from(self.entries) / u128::from(self.tokens.max(1));
        u64::try_from(closed).unwrap_or(u64::MAX)
    }

    /// All entries after `n` tokens; none when there is no token. Saturates.
    pub fn entries(&self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.closed(n).saturating_add(u64::from(self.open)) }
    }

    /// Entries of an `n`-token sequence that are already there when its first `cached` tokens are.
    /// Open entries count only when nothing is missing.
    pub fn held(&self, cached: u64, n: u64) -> u64 {
        if cached >= n { self.entries(n) } else { self.closed(cached) }
    }
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.entries, self.open) {
            (0, open) => write!(f, "{open} per sequence"),
            (entries, 0) => write!(f, "{entries} per {} tokens", self.tokens),
            (entries, open) => write!(f, "{entries} per {} tokens and {open} open", self.tokens),
        }
    }
}

/// What states have in common that differ only in their name: element format, axes, law.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// The element.
    pub format: Format,
    /// The axes of one entry; none for a scalar or an opaque record.
    pub axes: Vec<Axis>,
    /// How many entries there are.
    pub law: Law,
}

/// What writes the states of a kind: a name means what the code that writes it makes of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writer {
    /// What it is, for messages: its function, its engine and version, and what it runs on.
    pub name: String,
    /// A digest of what it writes for a fixed input, read at the described places; `None` where it could not be called.
    pub bytes: Option<String>,
    /// What stands in where it could not: a digest of its code, or the version and all that could change it.
    pub code: String,
}

impl Writer {
    /// Whether two writers make the same of a name: what they wrote decides, and their code where that is not known of
    /// both. A side that says nothing of its writer fits one whose bytes are known: it was taken by its name until now.
    pub fn agree(one: Option<&Self>, other: Option<&Self>) -> bool {
        match (one, other) {
            (None, None) => true,
            (Some(known), None) | (None, Some(known)) => known.bytes.is_some(),
            (Some(one), Some(other)) => match (&one.bytes, &other.bytes) {
                (Some(bytes), Some(others)) => bytes == others,
                _ => one.code == other.code,
            },
        }
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.bytes {
            Some(bytes) => write!(f, "{} (its bytes: {bytes})", self.name),
            None => write!(f, "{} (could not be called; its code: {})", self.name, self.code),
        }
    }
}

/// A half-open range on one axis. Written `[start, end]` in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct Span {
    /// First index inside.
    pub start: u64,
    /// First index after it.
    pub end: u64,
}

impl Span {
    /// Number of indices; zero when the range is empty or backwards.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether no index lies inside.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The part that both have; `None` when there is none.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (!both.is_empty()).then_some(both)
    }
}

impl From<Range<u64>> for Span {
    fn from(range: Range<u64>) -> Self {
        Self { start: range.start, end: range.end }
    }
}

impl From<(u64, u64)> for Span {
    fn from((start, end): (u64, u64)) -> Self {
        Self { start, end }
    }
}

impl From<Span> for (u64, u64) {
    fn from(span: Span) -> Self {
        (span.start, span.end)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// A range on every axis of a state: what one rank holds of an entry. A replicated state is the same
/// box on several ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StateBox(pub Vec<Span>);

impl StateBox {
    /// A box from one range an axis.
    pub fn new(spans: impl IntoIterator<Item = Range<u64>>) -> Self {
        Self(spans.into_iter().map(Span::from).collect())
    }

    /// The box that holds whole entries.
    pub fn whole(axes: &[Axis]) -> Self {
        Self::new(axes.iter().map(|axis| 0..axis.length))
    }

    /// Elements inside; one when there is no axis. Saturates.
    pub fn volume(&self) -> u64 {
        self.0.iter().fold(1, |volume, span| volume.saturating_mul(span.len()))
    }

    /// The part that both have; `None` when there is none or they have different numbers of axes.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if self.0.len() != other.0.len() {
            return None;
        }
        let spans = self.0.iter().zip(&other.0);
        spans.map(|(a, b)| a.intersect(b)).collect::<Option<_>>().map(Self)
    }

    /// What is left of this box without `other`, as disjoint boxes, appended to `rest`.
    pub fn subtract(&self, other: &Self, rest: &mut Vec<Self>) {
        let Some(hole) = self.intersect(other) else {
            rest.push(self.clone());
            return;
        };
        let mut core = self.clone();
        for axis in 0..core.0.len() {
            let (whole, inner) = (core.0[axis], hole.0[axis]);
            for side in [Span::from(whole.start..inner.start), Span::from(inner.end..whole.end)] {
                if !side.is_empty() {
                    let mut slice = core.clone();
                    slice.0[axis] = side;
                    rest.push(slice);
                }
            }
            core.0[axis] = inner;
        }
    }
}

impl fmt::Display for StateBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, span) in self.0.iter().enumerate() {
            write!(f, "{}{span}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

/// Which entries of a state a rank holds under context parallelism: those whose index modulo
/// `modulus` lies in `held`. Without context parallelism it is [`Phase::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Number of ranks times the length of a rank's turn.
    pub modulus: u64,
    /// The residues that this rank holds.
    pub held: Span,
}

impl Phase {
    /// Every entry.
    pub const ALL: Self = Self { modulus: 1, held: Span { start: 0, end: 1 } };

    /// The share of rank `rank` of `ranks` that take turns of `interleave` entries.
    pub fn share(rank: u64, ranks: u64, interleave: u64) -> Self {
        Self {
            modulus: ranks.saturating_mul(interleave),
            held: (rank.saturating_mul(interleave)
                ..rank.saturating_add(1).saturating_mul(interleave))
                .into(),
        }
    }

    /// Whether every entry is held.
    pub fn is_all(&self) -> bool {
        self.held.len() == self.modulus
    }

    /// Whether entry `index` is held.
    pub fn holds(&self, index: u64) -> bool {
        let residue = index % self.modulus;
        self.held.start <= residue && residue < self.held.end
    }

    /// How many entries below `index` are held: the local index of entry `index` where it is held.
    pub fn local(&self, index: u64) -> u64 {
        let residue = (index % self.modulus).clamp(self.held.start, self.held.end);
        index / self.modulus * self.held.len() + (residue - self.held.start)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} modulo {}", self.held, self.modulus)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn laws_count_entries() {
        assert_eq!(Law::PER_TOKEN.entries(7), 7);
        assert_eq!(Law::every(4).entries(7), 1);
        assert_eq!(Law::SNAPSHOT.entries(7), 1);
        assert_eq!(Law::SNAPSHOT.entries(0), 0);
        assert_eq!(Law::SNAPSHOT.held(6, 7), 0);
        assert_eq!(Law::SNAPSHOT.held(7, 7), 1);
        let tail = Law { entries: 1, tokens: 4, open: 1 };
        assert_eq!(tail.entries(7), 2);
        assert_eq!(tail.held(6, 7), 1);
        assert_eq!(Law::PER_TOKEN.entries(u64::MAX), u64::MAX);
    }

    fn boxes() -> impl Strategy<Value = StateBox> {
        prop::collection::vec((0u64..5, 1u64..4), 3)
            .prop_map(|spans| StateBox::new(spans.into_iter().map(|(at, len)| at..at + len)))
    }

    fn points(state_box: &StateBox) -> Vec<[u64; 3]> {
        let mut points = vec![];
        for x in state_box.0[0].start..state_box.0[0].end {
            for y in state_box.0[1].start..state_box.0[1].end {
                for z in state_box.0[2].start..state_box.0[2].end {
                    points.push([x, y, z]);
                }
            }
        }
        points
    }

    proptest! {
        #[test]
        fn boxes_behave_like_sets_of_points(a in boxes(), b in boxes()) {
            let mut rest = vec![];
            a.subtract(&b, &mut rest);
            let (in_a, in_b) = (points(&a), points(&b));
            let mut left: Vec<_> = rest.iter().flat_map(points).collect();
            left.sort_unstable();
            let expected: Vec<_> = in_a.iter().copied().filter(|p| !in_b.contains(p)).collect();
            prop_assert_eq!(left, expected);
            let both = a.intersect(&b).map(|both| points(&both)).unwrap_or_default();
            let expected: Vec<_> = in_a.iter().copied().filter(|p| in_b.contains(p)).collect();
            prop_assert_eq!(both, expected);
            prop_assert_eq!(a.volume(), in_a.len() as u64);
        }

        #[test]
        fn local_indices_count_the_held_entries(ranks in 1u64..5, turn in 1u64..4, rank in 0u64..5) {
            let phase = Phase::share(rank % ranks, ranks, turn);
            let mut held = 0;
            for index in 0..40 {
                prop_assert_eq!(phase.local(index), held);
                prop_assert_eq!(phase.holds(index), index / turn % ranks == rank % ranks);
                held += u64::from(phase.holds(index));
            }
        }
    }
}
