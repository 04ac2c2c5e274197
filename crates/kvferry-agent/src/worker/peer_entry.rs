//! What is known of the engine at one address.
//!
//! Tickets come through clients, who can write any life of an engine into them. So a life that is not the known one
//! changes nothing: the engine is asked who it is, once for all tickets that wait, and what is known is let go of
//! only when it answers that it is another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::source_engine::SourceEngine;
use crate::rules::failure::Failure;
use crate::wire::ticket::Incarnation;

/// An engine that does not fit is not asked again for so long.
const REFUSED_FOR: Duration = Duration::from_secs(1);
/// Nor is one that is connected to, because of tickets of lives that are not its own.
const PAUSE: Duration = Duration::from_millis(250);
/// So many lives that are not an engine's are remembered: tickets do not live long.
const VOID: usize = 64;

#[derive(Debug, Default)]
pub(super) struct PeerEntry {
    /// Held by whoever shakes hands.
    pub(super) hands: tokio::sync::Mutex<()>,
    facts: Mutex<Facts>,
}

#[derive(Debug, Default)]
struct Facts {
    engine: Option<Arc<SourceEngine>>,
    /// Lives that it has had, or that tickets have made up.
    void: VecDeque<Incarnation>,
    /// That the engine of a ticket does not fit, and until when it is not asked again.
    refused: Option<(Incarnation, String, Instant)>,
    /// When it was asked last who it is, and has answered.
    asked: Option<Instant>,
    /// The life with which somebody shakes hands.
    meeting: Option<Incarnation>,
}

impl Facts {
    fn avoid(&mut self, life: Incarnation) {
        if !self.void.contains(&life) {
            self.void.truncate(VOID - 1);
            self.void.push_front(life);
        }
    }
}

impl PeerEntry {
    /// What is known of the engine of a ticket that came at this moment; `None`: it has to be asked.
    pub(super) fn look(
        &self,
        life: Incarnation,
        came: Instant,
        connected: impl Fn() -> bool,
    ) -> Option<Result<Arc<SourceEngine>, Failure>> {
        let mut facts = self.facts.lock();
        let since = facts.asked.is_some_and(|asked| asked >= came);
        if let Some(engine) = &facts.engine {
            if engine.incarnation == life {
                return Some(Ok(engine.clone()));
            }
            if since {
                facts.avoid(life);
            }
            if since || (facts.void.contains(&life) && connected()) {
                return Some(Err(Failure::Restarted));
            }
        }
        match &facts.refused {
            Some((refused, reason, until))
                if since || (*refused == life && Instant::now() < *until) =>
            {
                Some(Err(Failure::Refused(reason.clone())))
            }
            _ => None,
        }
    }

    /// When it may be asked, if it is connected to: clients choose how often they name other lives.
    pub(super) fn not_before(&self) -> Option<Instant> {
        let facts = self.facts.lock();
        let answers = facts.engine.is_some() || facts.refused.is_some();
        facts.asked.filter(|_| answers).map(|asked| asked + PAUSE)
    }

    /// Whether an engine is known.
    pub(super) fn is_known(&self) -> bool {
        self.facts.lock().engine.is_some()
    }

    /// Whether it has answered that it is in this life, asked at this moment. If it is in another than the known
    /// one, that is not known any more, and returned.
    pub(super) fn is_in(&self, life: Incarnation, asked: Instant) -> Answered<'_> {
        let mut facts = self.facts.lock();
        if facts.engine.as_ref().is_some_and(|engine| engine.incarnation == life) {
            facts.asked = Some(asked);
            facts.refused = None;
            return Answered::Known;
        }
        let old = facts.engine.take();
        if let Some(old) = &old {
            facts.avoid(old.incarnation);
        }
        facts.meeting = Some(life);
        Answered::New { old, meeting: Meeting(self) }
    }

    /// The engine that was asked at this moment.
    pub(super) fn meet(&self, engine: Arc<SourceEngine>, asked: Instant) {
        let mut facts = self.facts.lock();
        facts.void.retain(|life| *life != engine.incarnation);
        facts.engine = Some(engine);
        facts.asked = Some(asked);
        facts.refused = None;
    }

    /// It was asked for a ticket of this life at this moment, and does not fit.
    pub(super) fn refuse(&self, life: Incarnation, reason: String, asked: Instant) {
        let mut facts = self.facts.lock();
        facts.refused = Some((life, reason, Instant::now() + REFUSED_FOR));
        facts.asked = Some(asked);
    }

    /// Whether there is nothing to remember.
    pub(super) fn is_empty(&self) -> bool {
        let facts = self.facts.lock();
        let refuses = |(.., until): &(_, _, Instant)| Instant::now() < *until;
        facts.engine.is_none() && !facts.refused.as_ref().is_some_and(refuses)
    }

    /// The lives in which it is known, or just met.
    pub(super) fn lives(&self) -> impl Iterator<Item = Incarnation> + use<> {
        let facts = self.facts.lock();
        let known = facts.engine.as_ref().map(|engine| engine.incarnation);
        known.into_iter().chain(facts.meeting)
    }

    /// Takes the engine, if it is to go.
    pub(super) fn take_if(
        &self,
        goes: impl FnOnce(&Arc<SourceEngine>) -> bool,
    ) -> Option<Arc<SourceEngine>> {
        self.facts.lock().engine.take_if(|engine| goes(engine))
    }
}

/// Who has answered.
pub(super) enum Answered<'a> {
    /// The engine that is known.
    Known,
    /// Another one.
    New { old: Option<Arc<SourceEngine>>, meeting: Meeting<'a> },
}

/// Hands are being shaken, until this is dropped.
pub(super) struct Meeting<'a>(&'a PeerEntry);

impl Drop for Meeting<'_> {
    fn drop(&mut self) {
        self.0.facts.lock().meeting = None;
    }
}
