//! Loads whose own life panics.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Manifest;
use kvferry_testkit::large::hundred_layers;
use kvferry_transport::Error;

use super::{Load, Notice, Outcome, Worker, WorkerOptions};
use crate::carrier::{Carrier, Source};
use crate::rules::failure::Failure;
use crate::wire::ticket::{Incarnation, Ticket};

/// The name of a load that panics whatever happens to it.
pub(super) const PANICS: &str = "panics";

#[derive(Debug)]
struct Nothing;

impl Carrier for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        Ok(vec![])
    }

    fn connect(&self, _: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
        Err(Error::Unsupported("nobody reads here".to_owned()))
    }
}

/// The engine hears of it, and the name and the blocks are its own again.
#[test]
fn a_load_that_panics_ends() {
    let mut draft = hundred_layers(4);
    draft.rank = 0;
    let manifest = Manifest::new(draft).unwrap();
    let worker = Worker::start(WorkerOptions::new(1), manifest, Arc::new(Nothing)).unwrap();
    let ticket = Ticket {
        engine: "p".to_owned(),
        address: "nowhere".to_owned(),
        incarnation: Incarnation(1),
        request: "r".to_owned(),
        nonce: 1,
        term_ms: 1000,
    };
    let long = Duration::from_secs(60);
    for _ in 0..2 {
        let load = Load {
            request: PANICS.to_owned(),
            ticket: ticket.clone(),
            grant: None,
            origin: None,
            tokens: 1,
            cached: vec![],
            destination: vec![],
            deadline: long,
            patience: long,
            rest: false,
        };
        worker.load(load).unwrap();
        worker.abort(PANICS);
        let notices = worker.wait(Instant::now() + long);
        let [Notice::Ended(ending)] = &notices[..] else { panic!("{notices:?}") };
        let failed = matches!(ending.outcome, Outcome::Failed(Failure::Internal(_)));
        assert!(failed && !ending.quarantined, "{ending:?}");
        assert!(worker.loads().is_empty());
    }
}
