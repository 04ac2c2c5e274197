//! An engine that is about to go: it promises nothing new, keeps what it has promised, and says when
//! nothing is left.

use std::time::Duration;

use super::status::ask;
use crate::error::{Misbehaviour, PeerError};
use crate::wire::message::{Left, Question, Reply};
use crate::wire::trust::Trust;

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Drain {
    /// The engine promises what it is asked to.
    #[default]
    Off,
    /// Nothing new; something is left.
    Draining,
    /// Nothing is left, and that has been said.
    Drained,
}

/// Tells a running agent to drain, or to stop draining, and learns what is left. It may be told as often
/// as one likes.
pub fn ask_drain(
    address: &str,
    trust: &Trust,
    patience: Duration,
    on: bool,
) -> Result<Left, PeerError> {
    match ask(address, trust, patience, "kvferry drain", Question::Drain { on })? {
        Reply::Left(left) => Ok(left),
        Reply::Refused(reason) => Err(PeerError::Refused(reason)),
        _ => Err(PeerError::Misbehaved(Misbehaviour::Answer)),
    }
}
