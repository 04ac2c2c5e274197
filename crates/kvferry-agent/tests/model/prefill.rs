//! What P does: its own part around the real table of leases.

use kvferry_agent::lease::{Answer, Consumer, NotGrown};
use kvferry_agent::{Claim, Fingerprint, InFlight, Loss};

use crate::bounds::{Bounds, Fault};
use crate::world::{
    HOME, Message, NAME, RANKS, REQUEST, SCRAP, Told, Word, World, at, key, origin, place_of,
};

impl World {
    /// P has computed all at once, and grants it.
    pub(crate) fn grant(&mut self, bounds: &Bounds) -> Result<(), String> {
        self.grants += 1;
        (self.block, self.place, self.words) = (Some(self.grants), HOME, [self.grants; 2]);
        let granted =
            self.leases.grant(key(self.grants), bounds.all(0), Some(origin(false)), at(self.now));
        granted.map_err(|error| error.to_string())
    }

    /// P begins to compute, for whoever follows.
    pub(crate) fn begin(&mut self, restarts: u8, bounds: &Bounds) -> Result<(), String> {
        self.grants += 1;
        (self.block, self.place, self.words) = (Some(self.grants), HOME, [SCRAP; 2]);
        self.computing = Some(restarts);
        // When it began changes nothing.
        let first_epoch = bounds.first_epoch().into();
        let begun = self.leases.begin(key(self.grants), Some(NAME), first_epoch, at(0));
        begun.map_err(|error| error.to_string())?;
        self.promise(bounds);
        Ok(())
    }

    /// P writes a word into its block.
    pub(crate) fn write(&mut self, word: usize) -> Result<(), String> {
        if self.block != Some(self.grants) {
            return Err("P writes into a block that it has given away".to_owned());
        }
        self.words[word] = self.grants;
        Ok(())
    }

    /// P tells followers how far it is.
    pub(crate) fn advance(&mut self, tokens: u8, in_flight: &[InFlight], bounds: &Bounds) {
        let tables = bounds.grant(self.place, 0, tokens).tables;
        let tokens = tokens.into();
        let said = self.leases.advance_with(REQUEST, tokens, tables.clone(), in_flight);
        if matches!(said, Err(NotGrown::Changed { .. })) && bounds.p_goes_back() {
            self.forget(bounds);
            _ = self.leases.advance_with(REQUEST, tokens, tables, in_flight);
        }
        // Whatever else is wrong: nobody wants it any more, or nobody will get it in the end.
    }

    /// P says what it is about to complete, where it speaks of layers.
    pub(crate) fn promise(&mut self, bounds: &Bounds) {
        if bounds.layers {
            self.step += 1;
            let in_flight = InFlight { step: self.step.into(), tokens: bounds.tokens().into() };
            self.advance(0, &[in_flight], bounds);
            if bounds.fault == Fault::SpeaksTooEarly {
                (0..2).for_each(|layer| self.say(layer));
            }
        }
    }

    /// P says that a layer is written, for whoever hears it at any time from then on.
    pub(crate) fn say(&mut self, layer: u8) {
        self.said.insert(Word { life: self.born, step: self.step, layer });
    }

    /// All is computed.
    pub(crate) fn seal(&mut self, bounds: &Bounds) {
        self.computing = None;
        let all = bounds.grant(self.place, 0, bounds.tokens());
        let (tokens, tables, origin) = (all.tokens, all.tables, Some(origin(false)));
        let now = at(self.now);
        let mut sealed = self.leases.seal(REQUEST, tokens, tables.clone(), origin, now);
        if matches!(sealed, Err(NotGrown::Changed { .. })) && bounds.p_goes_back() {
            self.forget(bounds);
            sealed = self.leases.seal(REQUEST, tokens, tables, origin, now);
        }
        if sealed.is_err() {
            // Nobody wants it, or it is not what was granted: the block is free at once.
            self.give_up();
        }
    }

    /// The same lease, as if nothing had been said of it.
    fn forget(&mut self, bounds: &Bounds) {
        self.leases.revoke(REQUEST, at(self.now));
        let first_epoch = bounds.first_epoch().into();
        _ = self.leases.begin(key(self.grants), Some(NAME), first_epoch, at(0));
    }

    /// P starts over, in the same block, which others have overwritten meanwhile.
    pub(crate) fn start_over(&mut self, bounds: &Bounds) {
        self.computing = self.computing.map(|restarts| restarts - 1);
        self.words = [SCRAP; 2];
        if bounds.fault != Fault::NoEpoch {
            _ = self.leases.restart(REQUEST);
        }
        self.promise(bounds);
    }

    /// P ends the request before it is complete.
    pub(crate) fn give_up(&mut self) {
        self.leases.revoke(REQUEST, at(self.now));
        (self.block, self.words, self.computing) = (None, [SCRAP; 2], None);
    }

    /// Time passes.
    pub(crate) fn tick(&mut self, bounds: &Bounds) -> Result<(), String> {
        self.now += 1;
        let grew = self.grows();
        if bounds.fault != Fault::NoExpiry {
            self.leases.expire(at(self.now));
        }
        if grew && !self.grows() {
            return Err("a lease that grows has expired".to_owned());
        }
        if grew && bounds.fault == Fault::ExpiresWhileItGrows {
            self.leases.revoke(REQUEST, at(self.now));
            (self.block, self.words) = (None, [SCRAP; 2]);
        }
        self.reuse()
    }

    /// Whether there is a lease that grows.
    fn grows(&self) -> bool {
        self.leases.frontier(REQUEST).is_some_and(|so_far| !so_far.sealed)
    }

    /// P's process starts over: of its earlier life it remembers nothing.
    pub(crate) fn restart(&mut self, bounds: &Bounds) {
        self.born = self.grants;
        self.leases = crate::world::no_leases();
        if bounds.fault == Fault::NoIncarnation {
            // It numbers its leases from the start again.
            (self.grants, self.born) = (0, 0);
        }
        (self.block, self.words, self.computing) = (None, [SCRAP; 2], None);
        // It numbers its steps from the start again, too.
        self.step = 0;
        self.tidy();
    }

    /// P answers a rank that asks how far it is.
    pub(crate) fn tell(&mut self, r: usize, bounds: &Bounds) {
        let Some(load) = &mut self.ranks[r].load else { return };
        let mut lease = key(load.grant);
        if load.grant == 0 || bounds.fault == Fault::FollowsTheName {
            // Of a name that P has not heard of it says nothing.
            let Some(found) = self.leases.named(NAME) else { return };
            lease = found;
        }
        let told = self.leases.look(&lease).ok().map(|told| Told {
            grant: lease.nonce as u8,
            epoch: told.grant.epoch as u8,
            tokens: told.grant.tokens as u8,
            place: place_of(told.grant),
            step: told.in_flight.last().map_or(0, |last| last.step as u8),
            sealed: told.sealed || (bounds.fault == Fault::NoSeal && told.grant.tokens > 0),
        });
        load.asked = bounds.repeats;
        load.answers.insert(told);
    }

    /// A free block of P is overwritten at once.
    pub(crate) fn reuse(&mut self) -> Result<(), String> {
        for _ in self.leases.take_released() {
            if self.computing.is_some() {
                return Err("P's block is released while P computes".to_owned());
            }
            (self.block, self.words) = (None, [SCRAP; 2]);
        }
        Ok(())
    }

    /// A message reaches P.
    pub(crate) fn reach_p(&mut self, message: &Message, bounds: &Bounds) -> Result<(), String> {
        // Each message says which life of P it is for.
        let current = |grant: &u8| *grant > self.born;
        match message {
            Message::Extend { grant } if current(grant) => {
                let grant = self.meant(*grant, bounds);
                self.leases.extend(&key(grant), at(self.now));
            }
            Message::Abandon { grant } if current(grant) => {
                let grant = self.meant(*grant, bounds);
                self.leases.abandon(&key(grant), at(self.now));
            }
            Message::Confirm { grant, rank, attempt, read_by, swapped } => {
                let answer = match current(grant) {
                    true => self.confirm(*grant, (*rank, *attempt), *read_by, *swapped, bounds),
                    false => Answer::NotHeld(Loss::Restarted),
                };
                self.reuse()?;
                if usize::from(*rank) < RANKS {
                    let (rank, attempt) = (*rank, *attempt);
                    self.send(Message::Answer { rank, attempt, answer });
                }
            }
            Message::Ask { grant, rank, attempt, read_by } => {
                let frontier = self.leases.frontier(REQUEST).filter(|so_far| {
                    let asked = (so_far.nonce, so_far.sealed, so_far.grant.fingerprint());
                    asked == (u64::from(*grant), true, *read_by)
                });
                let words = frontier.filter(|_| current(grant)).map(|_| self.words);
                let (rank, attempt) = (*rank, *attempt);
                self.send(Message::Digest { rank, attempt, words });
            }
            _ => {}
        }
        self.reuse()
    }

    fn confirm(
        &mut self,
        grant: u8,
        (rank, attempt): (u8, u8),
        read_by: Fingerprint,
        swapped: bool,
        bounds: &Bounds,
    ) -> Answer {
        let grant = self.meant(grant, bounds);
        let consumer = |rank: u8| {
            let attempt = if bounds.fault == Fault::NoAttempt { 0 } else { attempt };
            Consumer { engine: "d".into(), rank: rank.into(), ranks: 2, attempt: attempt.into() }
        };
        let mut claim = Claim { read_by, origin: Some(origin(swapped)) };
        match (bounds.fault, self.leases.frontier(REQUEST)) {
            // As if a reader said what P wants to hear.
            (Fault::NoFingerprint, Some(held)) => claim.read_by = held.grant.fingerprint(),
            (Fault::NoOrigin, _) => claim.origin = Some(origin(false)),
            _ => (),
        }
        let mut answer = self.leases.confirm(&key(grant), &consumer(rank), claim, at(self.now));
        let frontier = self.leases.frontier(REQUEST);
        if bounds.fault == Fault::NoSeal
            && frontier.is_some_and(|so_far| so_far.grant.fingerprint() == read_by)
        {
            answer = Answer::Held;
        }
        let open = self.leases.open() == 1;
        if bounds.fault == Fault::CountByNumber && open && answer == Answer::Held {
            // As if the next one counted, whoever sends it.
            let again = Message::Confirm { grant, rank: 2, attempt, read_by, swapped };
            if !self.sent.insert(again) {
                let other = consumer(1 - rank);
                self.leases.confirm(&key(grant), &other, claim, at(self.now));
            }
        }
        answer
    }

    /// Which grant P takes a message to be about.
    fn meant(&self, grant: u8, bounds: &Bounds) -> u8 {
        match (bounds.fault, self.block) {
            (Fault::NoNonce, Some(block)) => block,
            _ => grant,
        }
    }
}
