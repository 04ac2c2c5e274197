//! What the ranks of D do: their own part around the real life of a load and the real follower.

use std::sync::Arc;

use kvferry_agent::follow::Part;
use kvferry_agent::lease::Answer;
use kvferry_agent::life::{Action, Event, Life, Stage};
use kvferry_agent::{Failure, Grant, InFlight, Loss};

use crate::bounds::{Bounds, Fault};
use crate::world::{
    FOREIGN, Load, Message, RANKS, REQUEST, Rank, Reading, SCRAP, Told, Word, World, at, place_of,
};

/// What a load begins with.
pub(crate) struct Ticket {
    /// 0: only the name.
    pub(crate) grant: u8,
    /// What came with it.
    pub(crate) tables: Option<Grant>,
    pub(crate) swapped: bool,
}

impl World {
    /// A rank begins to load.
    pub(crate) fn load(&mut self, r: usize, ticket: Ticket, bounds: &Bounds) {
        let Ticket { grant, tables, swapped } = ticket;
        let asked = tables.is_none();
        let rank = &mut self.ranks[r];
        rank.attempts += 1;
        let attempt = rank.attempts;
        rank.kept_for = Some(attempt);
        rank.words = [SCRAP; 2];
        rank.load = Some(Load {
            life: Life::default(),
            grant,
            attempt,
            swapped,
            follower: bounds.follower(tables),
            asked,
            answers: <_>::default(),
            part: None,
            step: 0,
        });
        if grant > 0 {
            self.send(Message::Extend { grant });
        }
    }

    /// A rank that follows reads what it knows to be there, if anything.
    pub(crate) fn read_on(&mut self, r: usize, bounds: &Bounds) -> Result<(), String> {
        match self.choose(r) {
            Some(last) => self.happen(r, Event::Grown { last }, bounds),
            None => Ok(()),
        }
    }

    /// A rank hears what P has answered.
    pub(crate) fn hear(
        &mut self,
        r: usize,
        told: Option<Told>,
        bounds: &Bounds,
    ) -> Result<(), String> {
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        if !bounds.repeats {
            load.answers.remove(&told);
        }
        let Some(told) = told else {
            return self.happen(r, Event::NotHeld(Loss::Unknown), bounds);
        };
        if load.grant != 0 && load.grant != told.grant && bounds.fault != Fault::FollowsTheName {
            // P was asked by the name more than once, and another lease has it by now.
            return Ok(());
        }
        load.grant = told.grant;
        let mut grant = bounds.grant(told.place, told.epoch, told.tokens);
        load.step = told.step;
        let in_flight = InFlight { step: told.step.into(), tokens: 1 };
        let in_flight = if told.step > 0 { vec![in_flight] } else { vec![] };
        let known = load.follower.grant().epoch;
        match bounds.fault {
            Fault::KeepsOldEpoch => grant.epoch = known,
            Fault::TakesOldForNew => grant.epoch = grant.epoch.max(known),
            _ => {}
        }
        let grant = Arc::new(grant);
        if load.follower.hear(grant.clone(), in_flight.clone(), told.sealed).is_err() {
            if !bounds.d_goes_back() {
                let failure = Failure::Transport("contradiction".into());
                return self.happen(r, Event::Failed(failure), bounds);
            }
            // As if the follower had not looked.
            let kept = if grant.epoch == known { load.held(bounds) } else { 0 };
            load.follower = bounds.follower(None);
            _ = load.follower.hear(grant, in_flight, told.sealed);
            load.follower.arrived(&Part { tokens: kept, held: 0, last: false, layers: None });
        }
        if bounds.fault == Fault::BelievesThePromise && told.step > 0 {
            load.follower.written(told.step.into(), [0, 1]);
        }
        // While it reads it asks on.
        load.asked = bounds.repeats || !told.sealed;
        self.read_on(r, bounds)
    }

    /// The rank hears that a layer was written in a step, whatever it does at the moment.
    pub(crate) fn hear_word(
        &mut self,
        r: usize,
        word: Word,
        bounds: &Bounds,
    ) -> Result<(), String> {
        // Words are asked for with a ticket, which is of one life of P. There are two at most.
        let life = |grant| if grant > self.born { self.born } else { 0 };
        let Some(load) = &self.ranks[r].load else { return Ok(()) };
        if !matches!(load.life.stage(), Stage::Following | Stage::Reading { .. }) {
            // It does not know yet whom to listen to, or has all.
            return Ok(());
        }
        let ours = load.grant > 0 && life(load.grant) == word.life;
        if !ours && bounds.fault != Fault::NoLife {
            return Ok(());
        }
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        let step = if bounds.fault == Fault::NoStep { load.step } else { word.step };
        load.follower.written(step.into(), [usize::from(word.layer)]);
        match load.life.stage() {
            Stage::Following => self.read_on(r, bounds),
            _ => Ok(()),
        }
    }

    /// Chooses what a rank reads next, if there is anything: whether it is the last.
    fn choose(&mut self, r: usize) -> Option<bool> {
        let load = self.ranks[r].load.as_mut()?;
        load.part = load.follower.next();
        load.part.as_ref().map(|part| part.last)
    }

    /// A word lands: what is there at that moment, or what the network makes of it.
    pub(crate) fn land(
        &mut self,
        r: usize,
        word: usize,
        carry: impl FnOnce(u8) -> u8,
    ) -> Result<(), String> {
        let rank: &mut Rank = &mut self.ranks[r];
        let Some(reading) = &mut rank.reading else { return Ok(()) };
        if rank.kept_for != Some(reading.attempt) {
            return Err(format!("a late word lands in a block of D{r} in other use"));
        }
        reading.landed[word] = true;
        // What comes after the end nobody looks at.
        if rank.load.as_ref().is_some_and(|load| !load.life.stage().is_end()) {
            let there = if reading.place == self.place { self.words[word] } else { FOREIGN };
            rank.words[word] = carry(there);
        }
        Ok(())
    }

    /// Nothing more of a read will land.
    pub(crate) fn settle(&mut self, r: usize, bounds: &Bounds) -> Result<(), String> {
        let rank = &mut self.ranks[r];
        let Some(reading) = rank.reading.take() else { return Ok(()) };
        let reads = rank.load.as_ref().is_some_and(|load| load.attempt == reading.attempt);
        match (reads, reading.whole()) {
            (false, _) => Ok(()),
            // The transport does not know that the load may have ended.
            (true, true) => self.happen(r, Event::Arrived, bounds),
            (true, false) => {
                let failure = Failure::Transport("peer lost".into());
                self.happen(r, Event::Settled, bounds)?;
                self.happen(r, Event::Failed(failure), bounds)
            }
        }
    }

    /// A rank's process ends.
    pub(crate) fn crash(&mut self, r: usize) {
        let rank = &mut self.ranks[r];
        (rank.load, rank.reading, rank.kept_for) = (None, None, None);
        rank.words = [SCRAP; 2];
        self.tidy();
    }

    /// A message reaches a rank.
    pub(crate) fn reach_d(&mut self, message: &Message, bounds: &Bounds) -> Result<(), String> {
        match message {
            Message::Answer { rank, attempt, answer } => {
                let rank = usize::from(*rank);
                let asked = self.ranks[rank].load.as_ref();
                if asked.is_some_and(|load| load.attempt == *attempt) {
                    let event = match answer {
                        Answer::Held => Event::Held,
                        Answer::NotHeld(loss) => Event::NotHeld(*loss),
                    };
                    self.happen(rank, event, bounds)?;
                }
            }
            Message::Digest { rank, attempt, words } => {
                let r = usize::from(*rank);
                let own = self.ranks[r].words;
                let asked = self.ranks[r].load.as_ref();
                let asked = asked.filter(|load| load.life.stage() == &Stage::Auditing);
                if asked.is_some_and(|load| load.attempt == *attempt) {
                    let event = match words {
                        None => Event::NotHeld(Loss::Unknown),
                        Some(words) if *words == own => Event::Passed,
                        Some(_) => Event::Failed(Failure::Mismatch("a word".into())),
                    };
                    self.happen(r, event, bounds)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Something happens to a load, and what its life asks for is done.
    pub(crate) fn happen(&mut self, r: usize, event: Event, bounds: &Bounds) -> Result<(), String> {
        let Some(load) = &mut self.ranks[r].load else { return Ok(()) };
        if let (Event::Arrived, Some(part)) = (&event, &load.part) {
            load.follower.arrived(part);
        }
        let (grant, attempt, swapped) = (load.grant, load.attempt, load.swapped);
        let read_by = load.follower.grant().clone();
        for action in load.life.on(event) {
            let rank = &mut self.ranks[r];
            match action {
                Action::Queue => {}
                // It may hear something before it reads on.
                Action::Follow if rank.load.as_ref().is_some_and(Load::waits) => {}
                Action::Follow => self.read_on(r, bounds)?,
                Action::Read => {
                    let part = rank.load.as_ref().and_then(|load| load.part.as_ref());
                    let new = part.map_or(0..0, |part| part.held..part.tokens);
                    let layers = part.and_then(|part| part.layers.as_ref());
                    let words = match (bounds.layers, layers) {
                        (true, Some(layers)) => [0, 1].map(|layer| layers.contains(&layer)),
                        (true, None) => [!new.is_empty(); 2],
                        (false, _) => [new.contains(&0), new.contains(&1)],
                    };
                    let place = place_of(&read_by);
                    rank.reading = Some(Reading { attempt, place, words, landed: [false; 2] });
                }
                Action::Audit if !bounds.corruption || bounds.fault == Fault::NoAudit => {
                    return self.happen(r, Event::Passed, bounds);
                }
                Action::Audit => {
                    let (rank, read_by) = (r as u8, read_by.fingerprint());
                    self.send(Message::Ask { grant, rank, attempt, read_by });
                }
                Action::Confirm if bounds.fault == Fault::NoConfirmation => {
                    return self.happen(r, Event::Held, bounds);
                }
                Action::Confirm => {
                    let mut read_by = Grant::clone(&read_by);
                    if bounds.fault == Fault::KeepsOldEpoch
                        && let Some(now) = self.leases.frontier(REQUEST)
                    {
                        // It knows of the new epoch, and has not read anew.
                        read_by.epoch = now.grant.epoch;
                    }
                    if let Some(load) = &mut self.ranks[r].load {
                        load.follows_no_more();
                    }
                    let (rank, read_by) = (r as u8, read_by.fingerprint());
                    self.send(Message::Confirm { grant, rank, attempt, read_by, swapped });
                }
                // What was never found cannot be given up.
                Action::Abandon if grant == 0 => {}
                Action::Abandon => self.send(Message::Abandon { grant }),
                Action::Report => {
                    let done = rank.load.as_ref().is_some_and(|l| l.life.stage() == &Stage::Done);
                    if done && rank.words != [grant; 2] {
                        let words = rank.words;
                        return Err(format!("D{r} uses {words:?} for grant {grant}"));
                    }
                    if done && swapped {
                        return Err(format!("D{r} uses grant {grant} for another prompt"));
                    }
                    if let Some(load) = &mut rank.load {
                        load.follows_no_more();
                    }
                    rank.words = [SCRAP; 2];
                    self.tidy();
                }
                Action::Cancel if bounds.fault == Fault::HandBackOnCancel => {
                    rank.kept_for = None;
                }
                Action::Cancel => {}
                Action::HandBack => (rank.kept_for, rank.load) = (None, None),
            }
        }
        Ok(())
    }

    /// Nothing is delivered any more, and time passes on both sides.
    pub(crate) fn drain(mut self, bounds: &Bounds) -> Result<(), String> {
        for r in 0..RANKS {
            self.happen(r, Event::Deadline, bounds)?;
            let last = match self.ranks[r].reading.take() {
                Some(reading) if reading.whole() => Event::Arrived,
                _ => Event::Settled,
            };
            self.happen(r, last, bounds)?;
            if self.ranks[r].kept_for.is_some() {
                return Err(format!("D{r} does not get its block back"));
            }
        }
        if self.computing.is_some() {
            // Its own life ends the request.
            self.give_up();
        }
        for later in [5, 10] {
            if bounds.fault != Fault::NoExpiry {
                self.leases.expire(at(self.now + later));
            }
        }
        self.reuse()?;
        if self.block.is_some() || self.leases.open() > 0 || self.leases.remembered() > 0 {
            return Err("P does not get its block back".to_owned());
        }
        Ok(())
    }
}

impl Load {
    /// Whether there may be something to hear of P.
    fn waits(&self) -> bool {
        self.asked || !self.answers.is_empty()
    }

    /// How many tokens it has: what it would go on from if all were complete.
    fn held(&self, bounds: &Bounds) -> u64 {
        let now = self.follower.grant();
        let (place, epoch) = (place_of(now), now.epoch as u8);
        let mut all = self.follower.clone();
        _ = all.hear(bounds.grant(place, epoch, bounds.tokens()).into(), vec![], true);
        all.next().map_or(0, |part| part.held)
    }

    /// It waits for its last answer, or for what may still land: what it has heard and read so far matters no
    /// more.
    fn follows_no_more(&mut self) {
        (self.asked, self.step, self.part) = (false, 0, None);
        self.answers.clear();
        self.follower = <_>::default();
    }
}
