//! Transports that panic: what was done with them ends with an error, and the rest goes on.

use kvferry_agent::{Failure, Outcome};

use crate::common::faulty::{Fault, Switch};
use crate::common::*;

fn pair() -> (Engine, Engine, Switch) {
    let (p, switch) = (Recipe::new("p", 1).start(), Switch::default());
    let d = Recipe { faulty: true, switch: switch.clone(), ..Recipe::new("d", 1) }.start();
    (p, d, switch)
}

/// The failure of a load, and whether it was quarantined.
fn failure(p: &Engine, d: &Engine, name: &str) -> (String, bool) {
    let ticket = p.grant(name, &blocks_for(8, 3), 8);
    d.start_load(name, &ticket, &blocks_for(8, 3), &blocks_for(8, 9), 8, LONG);
    let ending = d.ranks[0].wait_end(name);
    let Outcome::Failed(Failure::Internal(what)) = ending.outcome else {
        panic!("{:?}", ending.outcome);
    };
    (what, ending.quarantined)
}

fn works(p: &Engine, d: &Engine, name: &str) {
    p.prefill(1, &blocks_for(8, 3), 8);
    let ticket = p.grant(name, &blocks_for(8, 3), 8);
    d.start_load(name, &ticket, &blocks_for(8, 3), &blocks_for(8, 9), 8, LONG);
    assert_eq!(d.wait_ends(name), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &blocks_for(8, 9), 8), 0);
}

#[test]
fn what_panics_fails_alone_and_its_blocks_come_back() {
    let (p, d, switch) = pair();
    // The second is met when the first has failed: it is connected to by then.
    for fault in [Fault::PanicsConnecting, Fault::PanicsReading] {
        *switch.lock().unwrap() = Some(fault);
        let (what, quarantined) = failure(&p, &d, "r");
        assert!(!quarantined, "{what}");
        assert_eq!(d.ranks[0].worker.loads(), []);
        *switch.lock().unwrap() = None;
        p.scheduler.revoke("r");
        works(&p, &d, "r");
    }
}

/// Nobody can say what lands there any more: the engine hears of the end, and keeps the blocks where they are.
#[test]
fn a_read_that_cannot_be_looked_at_keeps_its_blocks() {
    let (p, d, switch) = pair();
    *switch.lock().unwrap() = Some(Fault::PanicsLooking);
    let (what, quarantined) = failure(&p, &d, "r");
    assert!(quarantined, "{what}");
    let kept = [("r".to_owned(), "quarantined")];
    eventually("it is kept", || d.ranks[0].worker.loads() == kept);
    *switch.lock().unwrap() = None;
    works(&p, &d, "another");
}
