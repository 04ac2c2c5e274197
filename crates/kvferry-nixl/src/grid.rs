//! Equal copies on a regular grid: what prepared lists are made of.

use std::ffi::c_int;

use super::capi::Span;
use kvferry_layout::ByteCopy;
use kvferry_layout::Region;
use kvferry_transport::shared::spans::Spans;

/// Cells of `cell` bytes, side by side from `start` bytes into a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) region: Region,
    start: u64,
    cell: u64,
}

/// A grid of more cells costs more than it saves.
const MAX_CELLS: u64 = 1 << 22;

impl Grid {
    /// The grid that all copies lie on, on the side that `address` picks, and the cell of each.
    /// `None` when there is none, or when it has far more cells than there are copies.
    pub(super) fn of(
        copies: &[ByteCopy],
        address: impl Fn(&ByteCopy) -> u64,
        spans: &Spans,
    ) -> Option<(Self, Vec<c_int>)> {
        let first = copies.first()?;
        let cell = first.bytes;
        if cell == 0 {
            return None;
        }
        let at = spans.find(address(first), cell, usize::MAX)?;
        let region = *spans.0.get(at)?;
        let start = (address(first) - region.base) % cell;
        let grid = Self { region, start, cell };
        let cells = grid.cells();
        if cells > MAX_CELLS || cells / 4096 > copies.len() as u64 {
            return None;
        }
        let mut entries = Vec::with_capacity(copies.len());
        for copy in copies {
            let offset = address(copy).checked_sub(region.base)?.checked_sub(start)?;
            if copy.bytes != cell || offset % cell != 0 || offset / cell >= cells {
                return None;
            }
            entries.push(c_int::try_from(offset / cell).ok()?);
        }
        Some((grid, entries))
    }

    fn cells(&self) -> u64 {
        (self.region.bytes - self.start) / self.cell
    }

    /// All cells.
    pub(super) fn spans(self) -> impl Iterator<Item = Span> {
        let base = self.region.base + self.start;
        (0..self.cells()).map(move |i| (base + i * self.cell, self.cell, self.region.place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Where there is a grid, its cells are the copies; and copies on a grid are found to be.
        #[test]
        fn a_grid_is_the_copies(
            on_grid in any::<bool>(),
            start in 0u64..5,
            cell in 1u64..6,
            places in prop::collection::vec((0u64..20, 0u64..3), 1..10),
        ) {
            let spans = Spans::from_peer(vec![Region::host(10, 20), Region::host(100, 50)]).unwrap();
            let copies: Vec<ByteCopy> = places
                .iter()
                .map(|&(i, off)| {
                    let off = if on_grid { 0 } else { off };
                    ByteCopy { source: 100 + start + i * cell + off, destination: 0, bytes: cell }
                })
                .collect();
            let inside = copies.iter().all(|c| c.source + c.bytes <= 150);
            match Grid::of(&copies, |c| c.source, &spans) {
                Some((grid, entries)) => {
                    let cells: Vec<Span> = grid.spans().collect();
                    for (copy, &entry) in copies.iter().zip(&entries) {
                        let (base, bytes, _) = cells[entry as usize];
                        prop_assert_eq!((base, bytes), (copy.source, copy.bytes));
                    }
                    for (base, bytes, _) in cells {
                        prop_assert!(base >= 100 && base + bytes <= 150);
                    }
                }
                None => prop_assert!(!on_grid || !inside),
            }
        }
    }
}
