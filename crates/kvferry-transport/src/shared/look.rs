//! Looking at one's own registered memory, on the host or on a card.

use std::time::Instant;

use kvferry_digest::{Digest, Program, host};
use kvferry_layout::Place;

use super::desk::Desk;
use crate::contract::Error;

/// The digests of a program's parts, in registered memory.
pub(crate) fn digest(
    desk: &Desk,
    program: &Program,
    deadline: Instant,
) -> Result<Vec<Digest>, Error> {
    let Some(place) = program.nests().first().map(|nest| nest.place) else {
        return Ok(program.digests(&vec![[0, 0]; program.parts()]));
    };
    if program.nests().iter().any(|nest| nest.place != place) {
        let several = "a rank whose memory is in several places cannot be looked at";
        return Err(Error::Unsupported(several.to_owned()));
    }
    let extents: Vec<(u64, u64)> = program.extents().collect();
    let _holds = desk.regions.hold(&extents)?;
    if let Place::Gpu(card) = place {
        let unable = |error| Error::Unsupported(format!("looking at GPU {card}: {error}"));
        let looker = desk.lookers.of(card).map_err(unable)?;
        // SAFETY: as below, of a card's memory.
        return unsafe { looker.digest(program, deadline) };
    }
    // SAFETY: every extent lies in a registered region of host memory, which is held: whoever
    // registered it promised that it stays mapped, and nobody can take it back meanwhile.
    let digests = unsafe { host::digest(program, &|| Instant::now() >= deadline) };
    digests.ok_or(Error::DeadlinePassed)
}
