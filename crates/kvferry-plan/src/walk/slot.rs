//! Places in blocks, and the steps between them.

use crate::nest::Steps;

/// A place in one side's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) block: u32,
    pub(crate) within: Within,
}

/// A place in a block: kernel block, and entry in it. Also a step from one place to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Within {
    pub(crate) kernel: u64,
    pub(crate) entry: u64,
}

/// A step forward from one slot to another, by at most one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) blocks: u32,
    pub(crate) within: Within,
}

impl Within {
    /// Bytes from the block's start.
    pub(crate) fn offset(&self, steps: &Steps) -> u64 {
        self.kernel.wrapping_mul(steps.kernel).wrapping_add(self.entry.wrapping_mul(steps.entry))
    }
}

impl Step {
    /// Bytes that the step passes.
    pub(crate) fn offset(&self, steps: &Steps) -> u64 {
        u64::from(self.blocks).wrapping_mul(steps.block).wrapping_add(self.within.offset(steps))
    }
}

impl Slot {
    /// The place `times` steps on.
    pub(crate) fn ahead(&self, step: &Step, times: u64) -> Option<Self> {
        let blocks = u64::from(self.block) + times * u64::from(step.blocks);
        Some(Self {
            block: u32::try_from(blocks).ok()?,
            within: Within {
                kernel: self.within.kernel + times * step.within.kernel,
                entry: self.within.entry + times * step.within.entry,
            },
        })
    }

    /// The step from `self` to `next`, if it goes forward and at most one block on.
    pub(crate) fn step_to(&self, next: &Self) -> Option<Step> {
        let step = Step {
            blocks: next.block.checked_sub(self.block)?,
            within: Within {
                kernel: next.within.kernel.checked_sub(self.within.kernel)?,
                entry: next.within.entry.checked_sub(self.within.entry)?,
            },
        };
        (step.blocks <= 1 && step != Step::default()).then_some(step)
    }
}
