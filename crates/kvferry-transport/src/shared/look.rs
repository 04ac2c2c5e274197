//! Looking at one's own registered memory.

use std::time::Instant;

use kvferry_digest::{Digest, Program, host};
use kvferry_layout::Place;

use super::region::Regions;
use crate::contract::Error;

/// The digests of a program's parts, in registered host memory.
pub(crate) fn digest(
    regions: &Regions,
    program: &Program,
    deadline: Instant,
) -> Result<Vec<Digest>, Error> {
    if program.nests().iter().any(|nest| nest.place != Place::Host) {
        return Err(Error::Unsupported("this back end cannot look at a GPU's memory".to_owned()));
    }
    let extents: Vec<(u64, u64)> = program.extents().collect();
    let _holds = regions.hold(&extents)?;
    // SAFETY: every extent lies in a registered region of host memory, which is held: whoever
    // registered it promised that it stays mapped, and nobody can take it back meanwhile.
    let digests = unsafe { host::digest(program, &|| Instant::now() >= deadline) };
    digests.ok_or(Error::DeadlinePassed)
}
