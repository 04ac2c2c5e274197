//! Named cases: every section of the documents that this project implements, and every wrong answer
//! that users of other systems have met, with the geometry in which it was met. Sizes are real where a
//! brute-force judge can walk them; elsewhere ratios are.

mod models;

mod groups;
mod hybrids;
mod limits;
mod pipeline;
mod refused;
mod wrong;
