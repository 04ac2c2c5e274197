//! A request as loops: fits nests to the shapes of its segments.

use kvferry_layout::{BlockPair, Loops, LoopsError};

use crate::compile::{Merged, append_neighbours};
use crate::nest::{BothSteps, Loop, Nest};
use crate::walk::Shape;

/// The blocks of a pairing's segments, by shape.
pub(crate) type ByShape = Vec<(Shape, Vec<BlockPair>)>;

/// Nests, each for the segments of its pairing.
pub(crate) fn loops_over(nests: &[Merged], segments: &[ByShape]) -> Result<Loops, LoopsError> {
    let mut loops = Loops::default();
    // For every pairing that was met: its first table. There is one for each shape.
    let mut first_tables: Vec<Option<usize>> = vec![None; segments.len()];
    for alike in nests.chunk_by(|one, next| one.key == next.key) {
        let key = &alike[0].key;
        let shapes = &segments[key.pairing];
        if shapes.is_empty() {
            continue;
        }
        let first = *first_tables[key.pairing].get_or_insert_with(|| {
            let first = loops.tables();
            for (_, pairs) in shapes {
                loops.add_table(pairs.iter().copied());
            }
            first
        });
        for (table, (shape, _)) in (first..).zip(shapes) {
            let mut fitted: Vec<Nest> = alike.iter().map(|one| fit(&one.nest, shape)).collect();
            // What lies side by side in these segments, as the values of a block behind its keys, is one.
            fitted.sort_by_key(|nest| nest.destination);
            append_neighbours(&mut fitted);
            for Nest { source, destination, run, loops: inner, .. } in &fitted {
                loops.add_nest((*source, *destination), *run, key.blocks, inner, table)?;
            }
        }
    }
    Ok(loops)
}

/// A nest with the loops of a shape around it, as few as can be, the largest stride of the destination first.
fn fit(nest: &Nest, shape: &Shape) -> Nest {
    let (from, to) = (&nest.steps.source, &nest.steps.destination);
    let entries = Loop { count: shape.entries, source: from.entry, destination: to.entry };
    let (source, destination) = shape.steps(nest);
    let repeats = Loop { count: shape.repeats, source, destination };
    let start = (
        nest.source.wrapping_add(shape.source.offset(from)),
        nest.destination.wrapping_add(shape.destination.offset(to)),
    );
    let loops = nest.loops.iter().copied().chain([entries, repeats]);
    Nest::new(start, BothSteps::default(), nest.run, loops.collect())
}
