//! Which layers share a block table.

use kvferry_layout::Window;

use super::spec::Spec;
use crate::model::Sort;
use crate::rules::topology::Layout;

/// Layers that share a block table.
#[derive(Clone, Debug)]
pub(super) struct SpecGroup {
    pub(super) members: Vec<Spec>,
    /// Whether the engine keeps a spec for each layer, because pages differ.
    pub(super) by_layer: bool,
}

impl SpecGroup {
    /// Which tokens stay live: a window only where all members have it.
    pub(super) fn window(&self) -> Window {
        let mut windows = self.members.iter().map(|spec| spec.class.sort.window());
        let first = windows.next().flatten();
        match first {
            Some(tokens) if windows.all(|window| window == first) => Window::sliding(tokens),
            _ => Window::FULL,
        }
    }

    /// Tokens in a block; `None` for states of a fixed size.
    pub(super) fn block(&self) -> Option<u64> {
        let class = &self.members[0].class;
        (!class.sort.is_recurrent()).then_some(class.block)
    }
}

/// Groups the layers of the whole model.
pub(super) fn group(specs: Vec<Spec>, layout: Layout) -> Result<Vec<SpecGroup>, String> {
    if specs.iter().all(|spec| spec.class == specs[0].class) {
        return Ok(vec![SpecGroup { members: specs, by_layer: false }]);
    }
    if is_one_type(&specs) {
        return Ok(vec![SpecGroup { members: specs, by_layer: true }]);
    }
    let pages = |specs: &[Spec]| {
        let mut pages: Vec<u64> = specs.iter().map(Spec::page).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    };
    if layout.is_block_outermost() && pages(&specs).len() > 1 {
        return Ok(packed(specs));
    }
    match unify(specs.clone()) {
        Ok(specs) => Ok(split_evenly(specs)),
        Err(reason) => keep_all(specs).ok_or(reason),
    }
}

/// What the engine makes of its layers without the hybrid allocator: windows are kept as if they never
/// slid, so that all layers can share a block table.
pub(super) fn promote(mut specs: Vec<Spec>) -> Result<Vec<Spec>, String> {
    if is_one_type(&specs) {
        return Ok(specs);
    }
    let full = |spec: &&Spec| {
        let sort = &spec.class.sort;
        !sort.is_recurrent() && sort.window().is_none()
    };
    if specs.iter().any(|spec| matches!(spec.class.sort, Sort::Latent { window: Some(_), .. })) {
        return Err("it cannot keep the latents of a window in full".to_owned());
    }
    if let Some(block) = specs.iter().find(full).map(|spec| spec.class.block) {
        for spec in &mut specs {
            if let Sort::Attention { window: window @ Some(_) } = &mut spec.class.sort {
                *window = None;
                spec.class.block = block;
            }
        }
    }
    match is_one_type(&specs) {
        true => Ok(specs),
        false => Err("its layers cannot share one block table".to_owned()),
    }
}

/// The way out where latents stand beside sliding windows whose pages cannot be made equal.
fn keep_all(specs: Vec<Spec>) -> Option<Vec<SpecGroup>> {
    let members = promote(specs).ok()?;
    Some(vec![SpecGroup { members, by_layer: true }])
}

/// Whether all layers need the same number of token slots.
fn is_one_type(specs: &[Spec]) -> bool {
    let first = &specs[0];
    specs.iter().all(|spec| {
        spec.class.block == first.class.block
            && match (&first.class.sort, &spec.class.sort) {
                (Sort::Recurrent(_), Sort::Recurrent(_)) => first.page() == spec.page(),
                (Sort::Recurrent(_), _) | (_, Sort::Recurrent(_)) => false,
                (one, other) => one.window() == other.window(),
            }
    })
}

/// Makes all pages equal: smaller ones get more tokens where that fits, and padding where it does not.
fn unify(mut specs: Vec<Spec>) -> Result<Vec<Spec>, String> {
    let largest = specs.iter().map(Spec::page).max().unwrap_or(0);
    for spec in &mut specs {
        let page = spec.page();
        if page == largest {
            continue;
        }
        match spec.class.sort {
            Sort::Recurrent(_) => spec.class.padded = Some(largest),
            _ if largest % page == 0 => spec.class.block *= largest / page,
            Sort::Attention { .. } => spec.class.padded = Some(largest),
            Sort::Latent { .. } | Sort::Indexer => {
                return Err(format!(
                    "latent pages of {page} bytes can neither grow nor be padded to the {largest} \
                     bytes of other layers"
                ));
            }
        }
    }
    Ok(specs)
}

/// Groups of equal page size and, as far as possible, of equally many layers.
fn split_evenly(specs: Vec<Spec>) -> Vec<SpecGroup> {
    let mut buckets: Vec<Vec<Spec>> = vec![];
    for spec in specs {
        match buckets.iter_mut().find(|bucket| bucket[0].class == spec.class) {
            Some(bucket) => bucket.push(spec),
            None => buckets.push(vec![spec]),
        }
    }
    let fewest = buckets.iter().map(Vec::len).min().unwrap_or(1);
    let most = buckets.iter().map(Vec::len).max().unwrap_or(1);
    // A little padding is better than many groups.
    let size = if 2 * most < 3 * fewest { most } else { fewest };
    let mut groups = vec![];
    for bucket in buckets {
        let count = bucket.len().div_ceil(size);
        groups.extend(deal(bucket, count).map(|members| SpecGroup { members, by_layer: false }));
    }
    groups
}

/// Deals items to `count` hands in turn, so that pipeline stages stay balanced.
fn deal<T: Clone>(items: Vec<T>, count: usize) -> impl Iterator<Item = Vec<T>> {
    (0..count).map(move |hand| items.iter().skip(hand).step_by(count).cloned().collect())
}

/// Groups for layouts that put the pages of a block side by side, so that pages may differ.
fn packed(specs: Vec<Spec>) -> Vec<SpecGroup> {
    struct Bucket {
        members: Vec<Spec>,
        /// Members by page size, in the order of first appearance.
        by_page: Vec<(u64, Vec<Spec>)>,
        balanced: bool,
        is_state: bool,
    }
    let mut lists: Vec<Vec<Spec>> = vec![];
    for spec in specs {
        let fits = |list: &&mut Vec<Spec>| {
            let mut candidate = (**list).clone();
            candidate.push(spec.clone());
            is_one_type(&candidate)
        };
        match lists.iter_mut().find(fits) {
            Some(list) => list.push(spec),
            None => lists.push(vec![spec]),
        }
    }
    let mut buckets: Vec<Bucket> = lists
        .into_iter()
        .map(|members| {
            let mut by_page: Vec<(u64, Vec<Spec>)> = vec![];
            for spec in &members {
                match by_page.iter_mut().find(|(page, _)| *page == spec.page()) {
                    Some((_, list)) => list.push(spec.clone()),
                    None => by_page.push((spec.page(), vec![spec.clone()])),
                }
            }
            let balanced = by_page.iter().all(|(_, list)| list.len() == by_page[0].1.len());
            Bucket { members, by_page, balanced, is_state: false }
        })
        .collect();
    let repeats = |bucket: &Bucket| {
        bucket.by_page.iter().map(|(_, list)| list.len()).max().unwrap_or(0) as u64
    };
    // A balanced bucket of several page sizes stays whole, and sets how often the pattern of layers
    // repeats in a group.
    let floor = buckets
        .iter()
        .filter(|bucket| bucket.balanced && bucket.by_page.len() > 1)
        .map(&repeats)
        .max();
    let per_group = floor.map(|floor| {
        let counts: Vec<u64> =
            buckets.iter().filter(|bucket| bucket.balanced).map(&repeats).collect();
        least_padding(&counts, floor)
    });
    for bucket in &mut buckets {
        bucket.is_state = match bucket.members[0].class.sort {
            Sort::Recurrent(_) => true,
            ref sort => sort.window().is_some() && per_group.is_none(),
        };
    }
    let parts = |bucket: &Bucket| match per_group {
        Some(per_group) if bucket.balanced => repeats(bucket).div_ceil(per_group),
        _ => 1,
    };
    let widest = |bucket: &Bucket, parts: u64| -> u64 {
        bucket.by_page.iter().map(|(page, list)| (list.len() as u64).div_ceil(parts) * page).sum()
    };
    let anchor = buckets
        .iter()
        .map(|bucket| {
            let parts = if bucket.is_state { bucket.members.len() as u64 } else { parts(bucket) };
            widest(bucket, parts)
        })
        .max()
        .unwrap_or(0);
    let mut groups = vec![];
    for bucket in buckets {
        let mut count = parts(&bucket);
        if bucket.is_state {
            // A state group must not widen the block.
            let fitting = (anchor / bucket.members[0].page()).max(1);
            count = count.max((bucket.members.len() as u64).div_ceil(fitting));
        }
        if count == 1 {
            groups.push(SpecGroup { members: bucket.members, by_layer: true });
            continue;
        }
        let rounds = bucket.by_page.iter().map(|(_, list)| list.len()).min().unwrap_or(0);
        let pattern: Vec<Vec<Spec>> = (0..rounds)
            .map(|round| bucket.by_page.iter().map(|(_, list)| list[round].clone()).collect())
            .collect();
        for hand in deal(pattern, usize::try_from(count).expect("at most one per layer")) {
            groups.push(SpecGroup { members: hand.concat(), by_layer: true });
        }
    }
    groups
}

/// The number from `floor` on whose multiples cover `counts` with the least padding; the largest of
/// equals.
fn least_padding(counts: &[u64], floor: u64) -> u64 {
    let most = counts.iter().copied().max().unwrap_or(floor);
    let padding = |size: u64| -> u64 {
        counts.iter().map(|count| count.next_multiple_of(size) - count).sum()
    };
    (floor.max(1)..=most)
        .min_by_key(|&size| (padding(size), std::cmp::Reverse(size)))
        .unwrap_or(floor)
}
