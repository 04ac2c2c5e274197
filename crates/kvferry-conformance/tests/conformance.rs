//! kvferry's own back ends.

use std::process::ExitCode;

use kvferry_conformance::Suite;

fn main() -> ExitCode {
    Suite::of_kvferry().run()
}
