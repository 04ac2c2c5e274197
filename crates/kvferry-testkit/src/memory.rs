//! Memory as a tree that is walked from its first byte to its last.
//!
//! Addresses are *assigned* by the walk, with a cursor; strides are *stated* by looking at the tree
//! from outside. The two never use each other, so that a wrong address formula cannot hide.

/// One index of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dim {
    /// The block.
    Block,
    /// The kernel block in a block.
    Kernel,
    /// The entry in a kernel block.
    Slot,
    /// The axis with this number in the engine's list of axis names.
    Axis(usize),
    /// A repetition without meaning.
    Repeat,
}

/// A part of memory.
#[derive(Clone, Debug)]
pub enum Node {
    /// The body again and again, one after the other.
    Loop(Dim, u64, Box<Self>),
    /// Parts one after the other.
    Sequence(Vec<Self>),
    /// Parts on the same bytes, as long as the longest.
    Overlay(Vec<Self>),
    /// One element of an item, of so many bytes.
    Element(usize, u64),
    /// Bytes of a group that hold nothing to move.
    Scratch(usize, u64),
    /// Padding.
    Gap(u64),
}

/// Where the walk is.
#[derive(Clone, Debug)]
pub struct Index {
    /// The block.
    pub block: u64,
    /// The kernel block.
    pub kernel: u64,
    /// The entry in the kernel block.
    pub slot: u64,
    /// The index on each axis.
    pub axes: Vec<u64>,
}

impl Index {
    fn set(&mut self, dim: Dim, at: u64) {
        match dim {
            Dim::Block => self.block = at,
            Dim::Kernel => self.kernel = at,
            Dim::Slot => self.slot = at,
            Dim::Axis(axis) => self.axes[axis] = at,
            Dim::Repeat => {}
        }
    }
}

/// What the walk meets.
#[derive(Clone, Copy, Debug)]
pub enum Met {
    /// An element of this item.
    Element(usize),
    /// So many bytes of scratch of this group.
    Scratch(usize, u64),
}

/// What is seen from outside: an item or scratch, the offset of its first byte, and the loops around
/// it (dimension, count, stride), outermost first.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What it is.
    pub met: Met,
    /// Bytes from the tree's start.
    pub offset: u64,
    /// The loops around it.
    pub loops: Vec<(Dim, u64, u64)>,
}

impl Node {
    /// Bytes from start to end.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Loop(_, count, body) => count * body.bytes(),
            Self::Sequence(parts) => parts.iter().map(Self::bytes).sum(),
            Self::Overlay(parts) => parts.iter().map(Self::bytes).max().unwrap_or(0),
            Self::Element(_, bytes) | Self::Scratch(_, bytes) | Self::Gap(bytes) => *bytes,
        }
    }

    /// Walks from `cursor` on and reports every element and every scratch with its address.
    pub fn walk(
        &self,
        cursor: &mut u64,
        index: &mut Index,
        met: &mut impl FnMut(u64, &Index, Met),
    ) {
        match self {
            Self::Loop(dim, count, body) => {
                for at in 0..*count {
                    index.set(*dim, at);
                    body.walk(cursor, index, met);
                }
                index.set(*dim, 0);
            }
            Self::Sequence(parts) => {
                for part in parts {
                    part.walk(cursor, index, met);
                }
            }
            Self::Overlay(parts) => {
                let start = *cursor;
                let mut end = start;
                for part in parts {
                    *cursor = start;
                    part.walk(cursor, index, met);
                    end = end.max(*cursor);
                }
                *cursor = end;
            }
            Self::Element(item, bytes) => {
                met(*cursor, index, Met::Element(*item));
                *cursor += bytes;
            }
            Self::Scratch(group, bytes) => {
                met(*cursor, index, Met::Scratch(*group, *bytes));
                *cursor += bytes;
            }
            Self::Gap(bytes) => *cursor += bytes,
        }
    }

    /// States offset and strides of everything in the tree.
    pub fn describe(&self, offset: u64, loops: &mut Vec<(Dim, u64, u64)>, seen: &mut Vec<Seen>) {
        match self {
            Self::Loop(dim, count, body) => {
                loops.push((*dim, *count, body.bytes()));
                body.describe(offset, loops, seen);
                loops.pop();
            }
            Self::Sequence(parts) => {
                let mut start = offset;
                for part in parts {
                    part.describe(start, loops, seen);
                    start += part.bytes();
                }
            }
            Self::Overlay(parts) => {
                for part in parts {
                    part.describe(offset, loops, seen);
                }
            }
            Self::Element(item, _) => {
                seen.push(Seen { met: Met::Element(*item), offset, loops: loops.clone() });
            }
            Self::Scratch(group, bytes) => {
                let met = Met::Scratch(*group, *bytes);
                seen.push(Seen { met, offset, loops: loops.clone() });
            }
            Self::Gap(_) => {}
        }
    }

    /// The same memory with nothing in it but scratch of `group`.
    pub fn as_scratch(&self, group: usize) -> Self {
        let all = |parts: &[Self]| parts.iter().map(|part| part.as_scratch(group)).collect();
        match self {
            Self::Loop(Dim::Block, count, body) => {
                Self::Loop(Dim::Block, *count, body.as_scratch(group).into())
            }
            Self::Loop(_, count, body) => {
                Self::Loop(Dim::Repeat, *count, body.as_scratch(group).into())
            }
            Self::Sequence(parts) => Self::Sequence(all(parts)),
            Self::Overlay(parts) => Self::Overlay(all(parts)),
            Self::Element(_, bytes) => Self::Scratch(group, *bytes),
            other => other.clone(),
        }
    }
}
