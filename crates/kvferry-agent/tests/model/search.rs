//! Walks all worlds.

use std::collections::{HashSet, VecDeque};

use crate::bounds::Bounds;
use crate::shared::mark;
use crate::world::World;

/// Walks all worlds; answers how many there are, or the shortest way to one where a promise is broken.
pub(crate) fn explore(bounds: &Bounds) -> Result<usize, Vec<String>> {
    let start = World::new();
    let mut known = HashSet::from([mark(&start)]);
    // How each world was reached: from which, and the number of the step that led there.
    let mut ways = vec![(0, 0)];
    let mut queue = VecDeque::from([(0, start)]);
    while let Some((at, world)) = queue.pop_front() {
        let mut problem = world.clone().drain(bounds).err();
        let mut step = 0;
        world.next(bounds, &mut |name, then| {
            match then {
                Err(broken) => {
                    problem.get_or_insert_with(|| format!("{name}: {broken}"));
                }
                Ok(world) if known.insert(mark(&world)) => {
                    queue.push_back((ways.len(), world));
                    ways.push((at, step));
                }
                Ok(_) => {}
            }
            step += 1;
        });
        if let Some(problem) = problem {
            return Err(retrace(&ways, at, bounds, problem));
        }
    }
    Ok(ways.len())
}

/// The steps that led to a world, told from the start.
fn retrace(
    ways: &[(usize, usize)],
    mut at: usize,
    bounds: &Bounds,
    problem: String,
) -> Vec<String> {
    let mut steps = vec![];
    while at > 0 {
        steps.push(ways[at].1);
        at = ways[at].0;
    }
    let mut world = World::new();
    let mut told = vec![];
    for step in steps.into_iter().rev() {
        let (mut number, mut after) = (0, None);
        world.next(bounds, &mut |name, then| {
            if number == step {
                told.push(name.to_string());
                after = then.ok();
            }
            number += 1;
        });
        world = after.expect("the way there was good");
    }
    told.push(problem);
    told
}

/// Demands that no promise is broken.
pub(crate) fn check(bounds: &Bounds) {
    match explore(bounds) {
        Ok(worlds) => println!("{worlds} worlds, no promise broken"),
        Err(way) => panic!("a promise is broken:\n{}", way.join("\n")),
    }
}
