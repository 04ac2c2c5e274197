//! All that can happen next.

use std::fmt;

use kvferry_agent::life::{Event, Stage};

use crate::bounds::{Bounds, Fault};
use crate::decode::Ticket;
use crate::world::{AWAY, CORRUPT, HOME, RANKS, SCRAP, World, key};

/// Is told what can happen, and what comes of it: another world, or what went wrong on the way.
pub(crate) type Visit<'a> = dyn FnMut(fmt::Arguments<'_>, Result<World, String>) + 'a;

impl World {
    /// Visits every world that can follow, always in the same order.
    pub(crate) fn next(&self, bounds: &Bounds, visit: &mut Visit<'_>) {
        let mut moves = Moves { from: self, bounds, visit };
        moves.of_p();
        for message in self.sent.iter() {
            moves.step(format_args!("delivered: {message:?}"), |w| {
                w.reach_p(message, bounds)?;
                w.reach_d(message, bounds)
            });
        }
        for r in 0..RANKS {
            moves.of_rank(r);
        }
    }
}

struct Moves<'a, 'b> {
    from: &'a World,
    bounds: &'a Bounds,
    visit: &'a mut Visit<'b>,
}

impl Moves<'_, '_> {
    fn step(
        &mut self,
        name: fmt::Arguments<'_>,
        then: impl FnOnce(&mut World) -> Result<(), String>,
    ) {
        let mut world = self.from.clone();
        let result = then(&mut world).map(|()| world);
        if result.as_ref() != Ok(self.from) {
            (self.visit)(name, result);
        }
    }

    /// The same, where nothing can go wrong on the way.
    fn safe(&mut self, name: fmt::Arguments<'_>, then: impl FnOnce(&mut World)) {
        self.step(name, |world| {
            then(world);
            Ok(())
        });
    }

    fn of_p(&mut self) {
        let (from, bounds) = (self.from, self.bounds);
        if from.block.is_none() && from.computing.is_none() && from.grants < bounds.grants {
            match bounds.growth {
                None => self.step(format_args!("P grants"), |w| w.grant(bounds)),
                Some(restarts) => {
                    self.step(format_args!("P begins"), |w| w.begin(restarts, bounds));
                }
            }
        }
        if let Some(restarts) = from.computing {
            self.of_p_that_computes(restarts);
        }
        if from.now < bounds.ticks {
            self.step(format_args!("P's clock ticks"), |w| w.tick(bounds));
        }
        if bounds.restart && from.born == 0 && from.grants > 0 {
            self.safe(format_args!("P restarts"), |w| w.restart(bounds));
        }
    }

    fn of_p_that_computes(&mut self, restarts: u8) {
        let (from, bounds) = (self.from, self.bounds);
        let missing = from.words.iter().position(|word| *word == SCRAP);
        match (bounds.layers, missing) {
            (true, Some(layer)) => {
                self.step(format_args!("P writes layer {layer}"), |w| {
                    w.write(layer)?;
                    w.say(layer as u8);
                    Ok(())
                });
            }
            (true, None) => self.safe(format_args!("P has computed all"), |w| w.seal(bounds)),
            (false, Some(0)) => self.step(format_args!("P has computed a word"), |w| {
                w.write(0)?;
                w.advance(1, &[], bounds);
                Ok(())
            }),
            (false, _) => self.step(format_args!("P has computed all"), |w| {
                w.write(1)?;
                w.seal(bounds);
                Ok(())
            }),
        }
        if restarts > 0 {
            self.safe(format_args!("P starts over"), |w| w.start_over(bounds));
        }
        if bounds.unsaid && from.place == HOME {
            self.safe(format_args!("P starts over elsewhere, and does not say so"), |w| {
                (w.place, w.words) = (AWAY, [SCRAP; 2]);
                w.promise(bounds);
            });
        }
        self.safe(format_args!("P gives up"), World::give_up);
    }

    fn of_rank(&mut self, r: usize) {
        let (from, bounds) = (self.from, self.bounds);
        let rank = &from.ranks[r];
        if rank.kept_for.is_none() && rank.attempts < bounds.attempts[r] {
            self.of_idle_rank(r);
        }
        if let Some(load) = &rank.load {
            let follows = load.life.stage() == &Stage::Following;
            let careless = bounds.fault == Fault::ReadsOverLateWords;
            let reads = matches!(load.life.stage(), Stage::Reading { .. });
            if load.asked && (follows || reads) {
                self.safe(format_args!("P tells D{r} how far it is"), |w| w.tell(r, bounds));
            }
            if follows {
                self.step(format_args!("D{r} reads on"), |w| w.read_on(r, bounds));
            }
            for told in load.answers.iter().filter(|_| follows || careless) {
                self.step(format_args!("D{r} hears {told:?}"), |w| w.hear(r, *told, bounds));
            }
            for word in from.said.iter() {
                self.step(format_args!("D{r} hears {word:?}"), |w| w.hear_word(r, *word, bounds));
            }
            // That a read breaks is below, where reads are.
            for event in [Event::Known, Event::Admitted, Event::Abort, Event::Deadline] {
                let name = format_args!("D{r}: {event:?}");
                self.step(name, |w| w.happen(r, event.clone(), bounds));
            }
            self.safe(format_args!("D{r} crashes"), |w| w.crash(r));
        }
        if let Some(reading) = &rank.reading {
            for word in (0..2).filter(|&word| reading.words[word]) {
                self.step(format_args!("word {word} lands on D{r}"), |w| {
                    w.land(r, word, |word| word)
                });
            }
            if bounds.corruption && reading.words[0] && !reading.landed[0] {
                let name = format_args!("a word lands corrupted on D{r}");
                self.step(name, |w| w.land(r, 0, |_| CORRUPT));
            }
            self.step(format_args!("D{r}'s read settles"), |w| w.settle(r, bounds));
        }
    }

    /// What a rank can begin to load.
    fn of_idle_rank(&mut self, r: usize) {
        let (from, bounds) = (self.from, self.bounds);
        let mut tickets = vec![];
        for grant in 1..=from.grants {
            match bounds.growth {
                None => tickets.push((grant, Some(bounds.all(0)))),
                Some(restarts) => {
                    tickets.push((grant, None));
                    // A client that has the ticket before the seal and guesses the tables makes D read what P has
                    // not written yet. Of the epochs it hears when P has sealed the lease, and says any of them.
                    let sealed = from.leases.look(&key(grant)).is_ok_and(|now| now.sealed);
                    let first = if sealed { bounds.first_epoch() } else { 0 };
                    if bounds.forgery {
                        let epochs = first..=first + restarts;
                        tickets.extend(epochs.map(|epoch| (grant, Some(bounds.all(epoch)))));
                    }
                }
            }
            if bounds.forgery {
                tickets.push((grant, Some(bounds.forged())));
            }
        }
        if bounds.names {
            tickets.push((0, None));
        }
        for (grant, tables) in tickets {
            for swapped in [false, true].into_iter().take(1 + usize::from(bounds.swaps)) {
                let by = tables.as_ref().map(|grant| (grant.epoch, &grant.tables[0].blocks));
                let what = if swapped { " for another prompt" } else { "" };
                let tables = tables.clone();
                self.safe(format_args!("D{r} loads grant {grant}{what}, by {by:?}"), |w| {
                    w.load(r, Ticket { grant, tables, swapped }, bounds);
                });
            }
        }
    }
}
