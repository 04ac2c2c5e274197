//! Looking at one's own registered memory, on the host or on a card.

use std::fmt;
use std::time::Instant;

use kvferry_digest::{Digest, Program, host};
use kvferry_layout::Place;

use super::admission::Admission;
use crate::contract::Error;

/// Looks at the memory of cards.
pub trait CardDigest: fmt::Debug + Send + Sync {
    /// The digests of a program's parts, in the memory of that card. Waits for them.
    ///
    /// # Safety
    ///
    /// Every extent of the program must be memory of the card, and stay so until this has ended.
    unsafe fn digest(
        &self,
        card: u32,
        program: &Program,
        deadline: Instant,
    ) -> Result<Vec<Digest>, Error>;
}

/// The digests of a program's parts, in registered memory. What is on a card, `cards` looks at.
pub fn digest(
    admission: &Admission,
    cards: Option<&dyn CardDigest>,
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
    let _holds = admission.regions.hold(&extents)?;
    match (place, cards) {
        // SAFETY: every extent lies in a registered region of that place, which is held: whoever registered it
        // promised that it stays mapped, and nobody can take it back meanwhile.
        (Place::Gpu(card), Some(cards)) => unsafe { cards.digest(card, program, deadline) },
        (Place::Gpu(card), None) => Err(Error::Unsupported(format!(
            "looking at GPU {card}: this transport knows host memory alone"
        ))),
        (Place::Host, _) => {
            // SAFETY: as above, of host memory.
            let digests = unsafe { host::digest(program, &|| Instant::now() >= deadline) };
            digests.ok_or(Error::DeadlinePassed)
        }
    }
}
