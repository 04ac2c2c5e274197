//! How far a lease has come, told to whoever follows it: only what it does not know yet.

use kvferry_plan::BlockTable;
use serde::{Deserialize, Serialize};

use super::ticket::Incarnation;
use crate::rules::grant::{Grant, InFlight};
use crate::rules::lease::{Frontier, LeaseKey};

/// What is followed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Sought {
    /// A lease that is known.
    Lease { incarnation: Incarnation, key: LeaseKey },
    /// The latest lease of this name, which may not have begun yet.
    Name(String),
}

/// What whoever asks knows already of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Which lease; `None` where only its name is known.
    pub(crate) nonce: Option<u64>,
    pub(crate) epoch: u32,
    pub(crate) tokens: u64,
    /// How many ids of each table; `None` where tables are not wanted.
    pub(crate) blocks: Option<Vec<u32>>,
    /// The last step in flight that was told of.
    pub(crate) step: u64,
}

/// How far a lease has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct News {
    pub(crate) incarnation: Incarnation,
    pub(crate) key: LeaseKey,
    pub(crate) epoch: u32,
    pub(crate) tokens: u64,
    /// Whether that is all.
    pub(crate) sealed: bool,
    /// What each table has beyond what is known.
    pub(crate) tables: Vec<Addition>,
    /// What is being computed beyond the tokens.
    pub(crate) in_flight: Vec<InFlight>,
    /// What goes with the blocks, for those who want the tables, once that is all.
    pub(crate) enclosed: Vec<u8>,
}

/// The end of a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addition {
    /// The table's first position.
    pub(crate) first: u64,
    /// How many ids come before these.
    pub(crate) known: u32,
    pub(crate) blocks: Vec<u32>,
}

impl Known {
    /// What is known with a grant, tables included.
    pub(crate) fn of(nonce: u64, grant: &Grant, step: u64) -> Self {
        let blocks = grant.tables.iter().map(|table| table.blocks.len() as u32);
        Self {
            nonce: Some(nonce),
            epoch: grant.epoch,
            tokens: grant.tokens,
            blocks: Some(blocks.collect()),
            step,
        }
    }

    /// Whether there is anything that it does not know.
    pub(crate) fn lacks(&self, news: &News) -> bool {
        let step = news.last_step();
        news.sealed
            || self.nonce != Some(news.key.nonce)
            || (news.epoch, news.tokens) != (self.epoch, self.tokens)
            || step > self.step
    }
}

impl News {
    /// What to tell of a lease to someone who knows this much.
    pub(crate) fn of(
        incarnation: Incarnation,
        key: LeaseKey,
        frontier: &Frontier<'_>,
        known: &Known,
    ) -> Self {
        let Frontier { grant, in_flight, enclosed, sealed, .. } = *frontier;
        let same = known.nonce == Some(key.nonce) && known.epoch == grant.epoch;
        let tables = known.blocks.iter().flat_map(|blocks| {
            grant.tables.iter().enumerate().map(move |(index, table)| {
                let had = blocks.get(index).copied().filter(|_| same).unwrap_or(0);
                // More than there are: it does not know what it says.
                let known = if had as usize <= table.blocks.len() { had } else { 0 };
                let blocks = table.blocks[known as usize..].to_vec();
                Addition { first: table.first, known, blocks }
            })
        });
        let tables = tables.collect();
        let in_flight = in_flight.to_vec();
        let Grant { epoch, tokens, .. } = *grant;
        let enclosed = match sealed && known.blocks.is_some() {
            true => enclosed.to_vec(),
            false => vec![],
        };
        Self { incarnation, key, epoch, tokens, sealed, tables, in_flight, enclosed }
    }

    /// The last step in flight; 0: there is none.
    pub(crate) fn last_step(&self) -> u64 {
        self.in_flight.last().map_or(0, |last| last.step)
    }

    /// What it makes of a grant that is known; `None` where it does not go on from there.
    pub(crate) fn after(self, known: &Grant) -> Option<Grant> {
        let Self { epoch, tokens, tables, .. } = self;
        let tables = tables.into_iter().enumerate().map(|(index, added)| {
            let Addition { first, known: had, mut blocks } = added;
            if had > 0 {
                let table = known.tables.get(index).filter(|_| epoch == known.epoch)?;
                let had = table.blocks.get(..had as usize).filter(|_| table.first == first)?;
                blocks.splice(..0, had.iter().copied());
            }
            Some(BlockTable { first, blocks })
        });
        Some(Grant { epoch, tokens, tables: tables.collect::<Option<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(epoch: u32, tokens: u64, tables: &[(u64, &[u32])]) -> Grant {
        let tables =
            tables.iter().map(|&(first, blocks)| BlockTable { first, blocks: blocks.to_vec() });
        Grant { epoch, tokens, tables: tables.collect() }
    }

    fn frontier(grant: &Grant, sealed: bool) -> Frontier<'_> {
        let in_flight = &[InFlight { step: 3, tokens: 99 }];
        Frontier { nonce: 7, grant, in_flight, enclosed: b"first", sealed }
    }

    /// What P tells of a lease to someone who knows `known` of its lease `nonce`.
    fn told(now: &Grant, nonce: u64, known: &Grant) -> News {
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        News::of(Incarnation(1), key, &frontier(now, false), &Known::of(nonce, known, 0))
    }

    #[test]
    fn only_what_is_new_of_the_tables_is_sent() {
        let grown = grant(0, 40, &[(0, &[1, 2, 3]), (5, &[9])]);
        for (known, sent) in [
            (grant(0, 0, &[]), 4),
            (grant(0, 16, &[(0, &[1]), (0, &[])]), 3),
            (grant(0, 40, &[(0, &[1, 2, 3]), (5, &[9])]), 0),
        ] {
            let news = told(&grown, 7, &known);
            assert_eq!(news.tables.iter().map(|added| added.blocks.len()).sum::<usize>(), sent);
            assert_eq!(news.after(&known), Some(grown.clone()));
        }
        // Of another epoch or lease nothing is known, nor of ids that are not there.
        let known = grant(0, 16, &[(0, &[1]), (0, &[])]);
        let anew = grant(1, 16, &[(0, &[8]), (0, &[])]);
        assert_eq!(told(&anew, 7, &known).after(&known), Some(anew.clone()));
        assert_eq!(told(&grown, 6, &known).tables[0].known, 0);
        let long = grant(0, 16, &[(0, &[1, 2, 3, 4, 5])]);
        assert_eq!(told(&grown, 7, &long).tables[0].known, 0);
        // Who wants no tables gets none.
        let known = Known { blocks: None, ..Known::of(7, &known, 0) };
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        let news = News::of(Incarnation(1), key, &frontier(&grown, true), &known);
        assert_eq!(news.tables, []);
    }

    #[test]
    fn what_is_enclosed_comes_with_the_tables_and_at_the_end() {
        let (so_far, key) =
            (grant(0, 40, &[(0, &[1])]), LeaseKey { request: "r".to_owned(), nonce: 7 });
        let enclosed = |sealed, known: &Known| {
            News::of(Incarnation(1), key.clone(), &frontier(&so_far, sealed), known).enclosed
        };
        let known = Known::of(7, &so_far, 3);
        assert_eq!(enclosed(true, &known), b"first");
        assert_eq!(enclosed(false, &known), b"");
        assert_eq!(enclosed(true, &Known { blocks: None, ..known }), b"");
    }

    #[test]
    fn a_step_in_flight_is_news_once() {
        let so_far = grant(0, 40, &[(0, &[1, 2, 3])]);
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        let lacks = |known: Known| {
            let news = News::of(Incarnation(1), key.clone(), &frontier(&so_far, false), &known);
            known.lacks(&news)
        };
        // Also for those who want no tables.
        for blocks in [Known::of(7, &so_far, 0).blocks, None] {
            let known = |step| Known { blocks: blocks.clone(), ..Known::of(7, &so_far, step) };
            assert!(lacks(known(0)));
            assert!(lacks(known(2)));
            assert!(!lacks(known(3)));
            assert!(lacks(Known { tokens: 39, ..known(3) }));
        }
    }

    #[test]
    fn news_that_go_on_from_nowhere_are_nothing() {
        let known = grant(0, 16, &[(0, &[1])]);
        let base = told(&grant(0, 40, &[(0, &[1, 2])]), 7, &known);
        let added = |first, known| vec![Addition { first, known, blocks: vec![2] }];
        for (epoch, tables) in
            [(0, added(0, 2)), (0, added(3, 1)), (1, added(0, 1)), (0, added(0, u32::MAX))]
        {
            assert_eq!(News { epoch, tables, ..base.clone() }.after(&known), None);
        }
    }
}
