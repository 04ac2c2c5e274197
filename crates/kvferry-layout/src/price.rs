//! What moving bytes costs.

/// What a transport takes for what it is asked to carry out, in nanoseconds. A transport supplies it;
/// a plan chooses by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// One operation, whatever is in it.
    pub launch: f64,
    /// One copy, whatever its length.
    pub copy: f64,
    /// One byte.
    pub byte: f64,
}

impl Price {
    /// What an operation of so many copies and bytes takes.
    pub fn of(&self, copies: u64, bytes: u64) -> f64 {
        self.launch + copies as f64 * self.copy + bytes as f64 * self.byte
    }
}

/// What reads from one peer take, by how they are carried out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Reading every copy by itself.
    pub direct: Price,
    /// Packing: a copy is a run that both sides move by themselves. `None` where the pair cannot.
    pub packed: Option<Price>,
}
