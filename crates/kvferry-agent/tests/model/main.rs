//! Every state that one prefill engine and two decode ranks can get into, under loss, duplication and
//! reordering of every message, crashes of either side, and a clock that may run at any pace.
//!
//! The state machines are the ones that serve. Around them is the worst world that the promises allow: a
//! message that was ever sent may be delivered at any time and any number of times, or never; P overwrites a
//! block the moment it is free; a cancelled read goes on landing until its transport says that it has
//! settled; the request keeps its name when it is served again; a decode rank may start over under its old
//! name. P may compute while ranks follow: a word at a time, starting over in a block that others have
//! overwritten meanwhile, or in other blocks, without saying so. Or it says what it is about to complete and,
//! layer by layer, what it has written, which may be heard at any time from then on. What it says may come
//! twice, late and in any order. Ranks come early, late or in between, with a ticket or with nothing but a
//! name, which may be used again; and a client may forge the tables, or send a ticket with another prompt
//! than its own.
//!
//! Shown in every state: what is used was read under a confirmed lease (invariant 3), nothing lands in a block
//! that was handed back (4), when nothing more is delivered and time passes, all blocks are back on both sides
//! and nothing is remembered (7), and what is used is what P granted (8). While P computes, its lease does not
//! expire, and nobody else gets its block. Where every load is audited, what is used is right even if the
//! network changes what it carries. Each safeguard is then taken away, and the check must find the damage.
//!
//! * [`bounds`]: how large a world is, what may go wrong in it, and which safeguard it lacks.
//! * [`world`]: what there is.
//! * [`prefill`], [`decode`]: what each side does, around the real rules.
//! * [`moves`]: all that can happen next.
//! * [`search`]: walks all worlds; [`shared`]: what they have in common.

mod bounds;
mod decode;
mod moves;
mod prefill;
mod search;
mod shared;
mod world;

use bounds::{Bounds, Fault};
use search::{check, explore};

#[test]
fn two_ranks_one_lease() {
    check(&Bounds { ticks: 2, ..Bounds::ONE_LEASE });
}

#[test]
fn the_request_is_served_again() {
    check(&Bounds { grants: 2, ticks: 1, ..Bounds::ONE_LEASE });
}

#[test]
fn a_rank_starts_over() {
    check(&Bounds { attempts: [2, 1], ticks: 1, ..Bounds::ONE_LEASE });
}

#[test]
fn the_prefill_engine_restarts() {
    check(&Bounds { grants: 2, restart: true, ..Bounds::ONE_LEASE });
}

#[test]
fn a_client_forges_tables() {
    check(&Bounds { ticks: 1, forgery: true, ..Bounds::ONE_LEASE });
}

#[test]
fn a_client_forges_tables_while_the_lease_grows() {
    let forged = Bounds { ticks: 1, forgery: true, growth: Some(0), ..Bounds::ONE_LEASE };
    check(&forged);
    let starts_over = Bounds { growth: Some(1), attempts: [1, 0], ..forged };
    check(&Bounds { names: true, ..starts_over });
    check(&Bounds { layers: true, ..starts_over });
}

#[test]
fn a_client_sends_a_ticket_with_another_prompt() {
    check(&Bounds { ticks: 1, swaps: true, ..Bounds::ONE_LEASE });
    let growth = Some(0);
    check(&Bounds { ticks: 1, swaps: true, growth, names: true, ..Bounds::ONE_RANK });
}

#[test]
fn ranks_follow_while_p_computes_and_starts_over_and_its_clock_ticks() {
    check(&Bounds { ticks: 2, growth: Some(1), ..Bounds::ONE_LEASE });
    let again = Bounds { grants: 2, ticks: 1, growth: Some(1), ..Bounds::ONE_RANK };
    check(&Bounds { ticks: 2, ..again });
    check(&Bounds { restart: true, ..again });
}

#[test]
fn a_rank_reads_layer_by_layer_while_p_starts_over_and_its_clock_ticks() {
    check(&Bounds { ticks: 1, growth: Some(1), layers: true, ..Bounds::ONE_RANK });
}

#[test]
fn a_rank_reads_layer_by_layer_while_p_restarts_and_its_clock_ticks() {
    let (growth, layers) = (Some(0), true);
    let bounds = Bounds { grants: 2, restart: true, growth, layers, ..Bounds::ONE_RANK };
    check(&Bounds { ticks: 1, ..bounds });
}

#[test]
fn two_ranks_read_layer_by_layer_while_the_clock_ticks() {
    check(&Bounds { ticks: 1, growth: Some(0), layers: true, ..Bounds::ONE_LEASE });
}

#[test]
fn ranks_know_only_a_name_which_is_used_again() {
    let named = Bounds { ticks: 1, growth: Some(0), names: true, ..Bounds::ONE_LEASE };
    check(&named);
    check(&Bounds { grants: 2, attempts: [1, 0], restart: true, ..named });
}

#[test]
fn what_p_says_comes_twice_late_and_in_any_order() {
    let repeats = Bounds { ticks: 1, repeats: true, growth: Some(1), ..Bounds::ONE_RANK };
    check(&Bounds { ticks: 2, ..repeats });
    check(&Bounds { layers: true, ..repeats });
    let growth = Some(0);
    check(&Bounds { grants: 2, names: true, growth, ..repeats });
    check(&Bounds { attempts: [1, 1], ticks: 0, growth, ..repeats });
    check(&Bounds { grants: 2, restart: true, growth, ..repeats });
}

/// P's engine goes on in other blocks than those that were granted, as if nothing had been. P refuses to grant
/// that, and D refuses to go on with it: each of them is enough. (In the same blocks neither of them could see
/// it: there, all depends on that the engine says so.)
#[test]
fn a_frontier_that_goes_back_is_noticed_by_either_side() {
    for fault in [Fault::None, Fault::NoGrowthRuleOfP, Fault::NoGrowthRuleOfD] {
        let unsaid = Bounds { unsaid: true, growth: Some(0), fault, ..Bounds::ONE_LEASE };
        check(&unsaid);
        let alone = Bounds { ticks: 1, attempts: [1, 0], ..unsaid };
        check(&Bounds { growth: Some(1), repeats: true, ..alone });
        check(&Bounds { layers: true, ..alone });
    }
}

#[test]
fn a_network_corrupts_what_it_carries() {
    check(&Bounds { ticks: 1, corruption: true, ..Bounds::ONE_LEASE });
}

/// Without each of its safeguards the protocol breaks, and the check sees it.
#[test]
fn every_safeguard_is_needed() {
    let one = Bounds::ONE_RANK;
    let forged = Bounds { forgery: true, ..one };
    let restarts = Bounds { grants: 2, restart: true, ..one };
    let grows = |bounds| Bounds { growth: Some(0), ..bounds };
    let starts_over = Bounds { growth: Some(1), ..one };
    let by_layer = |bounds| Bounds { layers: true, ..bounds };
    for (fault, sound) in [
        (Fault::NoConfirmation, Bounds { ticks: 1, ..one }),
        (Fault::CountByNumber, Bounds::ONE_LEASE),
        (Fault::NoNonce, Bounds { grants: 2, ticks: 1, ..one }),
        (Fault::NoAttempt, Bounds { attempts: [2, 0], ticks: 1, ..one }),
        (Fault::HandBackOnCancel, one),
        (Fault::NoExpiry, Bounds { attempts: [0, 0], ..one }),
        (Fault::ExpiresWhileItGrows, grows(Bounds { ticks: 1, ..one })),
        (Fault::NoIncarnation, restarts),
        (Fault::NoIncarnation, grows(restarts)),
        (Fault::NoFingerprint, forged),
        (Fault::NoFingerprint, grows(forged)),
        (Fault::EpochsCanBeGuessed, grows(forged)),
        (Fault::EpochsCanBeGuessed, Bounds { growth: Some(1), ..forged }),
        (Fault::NoOrigin, Bounds { swaps: true, ..one }),
        (Fault::NoEpoch, starts_over),
        (Fault::NoEpoch, by_layer(starts_over)),
        (Fault::KeepsOldEpoch, starts_over),
        (Fault::KeepsOldEpoch, by_layer(starts_over)),
        (Fault::TakesOldForNew, Bounds { repeats: true, ..starts_over }),
        (Fault::NoGrowthRule, grows(Bounds { unsaid: true, ..one })),
        (Fault::ReadsOverLateWords, starts_over),
        (Fault::NoSeal, grows(one)),
        (Fault::FollowsTheName, grows(Bounds { grants: 2, names: true, ..one })),
        (Fault::BelievesThePromise, by_layer(grows(one))),
        (Fault::SpeaksTooEarly, by_layer(grows(one))),
        (Fault::NoStep, by_layer(starts_over)),
        (Fault::NoLife, by_layer(grows(restarts))),
        (Fault::NoAudit, Bounds { corruption: true, ..one }),
    ] {
        if let Err(way) = explore(&sound) {
            panic!("{fault:?}: something is wrong while it is in place:\n{}", way.join("\n"));
        }
        match explore(&Bounds { fault, ..sound }) {
            Ok(worlds) => panic!("{fault:?}: nothing found in {worlds} worlds"),
            Err(way) => println!("{fault:?}:\n  {}", way.join("\n  ")),
        }
    }
}
