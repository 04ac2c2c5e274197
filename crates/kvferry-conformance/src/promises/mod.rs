//! The tests. Each holds every back end to one promise of `Transport`.

mod bounds;
mod card_packing;
mod cuda;
mod custody;
mod exact;
mod leaks;
mod local;
mod nixl;
mod packed;
mod peers;
mod twin;

use kvferry_transport::memory::HostMemory;

use crate::back_end::{BackEnd, CudaEnd, CudaTwinEnd, NixlTcpEnd, NixlTwinEnd, TcpEnd, TcpTwinEnd};
use crate::memory::CardMemory;

pub(crate) use self::local::reader;

pub(crate) type Promise = (&'static str, fn());

/// What all back ends promise.
pub(crate) fn all<B: BackEnd>() -> Vec<Promise> {
    vec![
        ("random_lists_are_exact", exact::random_lists_are_exact::<B>),
        ("large_copies_are_exact", exact::large_copies_are_exact::<B>),
        ("many_copies_are_exact", exact::many_copies_are_exact::<B>),
        ("many_operations_at_once", exact::many_operations_at_once::<B>),
        ("an_empty_list_is_done", exact::an_empty_list_is_done::<B>),
        ("reports_add_up", exact::reports_add_up::<B>),
        ("outside_is_refused", bounds::outside_is_refused::<B>),
        ("deregistered_is_outside", bounds::deregistered_is_outside::<B>),
        ("a_region_in_use_is_busy", bounds::a_region_in_use_is_busy::<B>),
        ("bad_descriptions_are_refused", bounds::bad_descriptions_are_refused::<B>),
        (
            "gpu_memory_is_not_mistaken_for_host_memory",
            bounds::gpu_memory_is_not_mistaken_for_host_memory::<B>,
        ),
        ("deadlines_hold", custody::deadlines_hold::<B>),
        ("cancelled_reads_never_land_late", custody::cancelled_reads_never_land_late::<B>),
        ("timed_out_reads_never_land_late", custody::timed_out_reads_never_land_late::<B>),
        ("disconnected_reads_never_land_late", custody::disconnected_reads_never_land_late::<B>),
        ("cancelling_one_disturbs_no_other", custody::cancelling_one_disturbs_no_other::<B>),
        ("dropped_transports_never_land_late", custody::dropped_transports_never_land_late::<B>),
        ("posting_does_not_wait", custody::posting_does_not_wait::<B>),
        ("a_killed_peer_is_an_error", peers::a_killed_peer_is_an_error::<B>),
        ("a_restarted_peer_is_reachable", peers::a_restarted_peer_is_reachable::<B>),
        (
            "a_peer_with_other_memory_is_read_anew",
            peers::a_peer_with_other_memory_is_read_anew::<B>,
        ),
        ("disconnecting_ends_operations", peers::disconnecting_ends_operations::<B>),
        ("packed_reads_are_exact", packed::packed_reads_are_exact::<B>),
        ("random_pairs_are_exact_in_every_way", packed::random_pairs_are_exact_in_every_way::<B>),
        ("packed_outside_is_refused", packed::packed_outside_is_refused::<B>),
        ("packed_reads_never_land_late", packed::packed_reads_never_land_late::<B>),
        (
            "cancelling_packed_reads_disturbs_no_other",
            packed::cancelling_packed_reads_disturbs_no_other::<B>,
        ),
        (
            "a_peer_killed_while_it_packs_is_an_error",
            packed::a_peer_killed_while_it_packs_is_an_error::<B>,
        ),
        ("nothing_leaks", leaks::nothing_leaks::<B>),
    ]
}

/// What only `local` promises.
pub(crate) fn for_local() -> Vec<Promise> {
    vec![("falls_back_to_tcp_and_says_so", local::falls_back_to_tcp_and_says_so)]
}

/// What only `cuda` promises, on a card.
pub(crate) fn for_cuda() -> Vec<Promise> {
    vec![
        ("mappings_go_with_their_peers", cuda::mappings_go_with_their_peers::<CudaEnd>),
        ("loops_are_exact", cuda::loops_are_exact::<CudaEnd>),
    ]
}

/// The same, and what a card does not do when it is told to.
pub(crate) fn for_cuda_twin() -> Vec<Promise> {
    vec![
        ("mappings_go_with_their_peers", cuda::mappings_go_with_their_peers::<CudaTwinEnd>),
        ("only_what_is_described_stays_open", cuda::only_what_is_described_stays_open),
        (
            "regions_beyond_their_allocation_are_refused",
            cuda::regions_beyond_their_allocation_are_refused,
        ),
        (
            "regions_of_this_process_must_be_registered",
            cuda::regions_of_this_process_must_be_registered,
        ),
        ("loops_are_exact", cuda::loops_are_exact::<CudaTwinEnd>),
        ("memory_that_cannot_be_opened_is_named", cuda::memory_that_cannot_be_opened_is_named),
        ("a_kernel_of_another_version_is_refused", cuda::a_kernel_of_another_version_is_refused),
        (
            "parts_of_mapped_memory_are_taken_one_by_one",
            cuda::parts_of_mapped_memory_are_taken_one_by_one,
        ),
        ("waiting_for_long_is_not_work", cuda::waiting_for_long_is_not_work),
        (
            "mapped_memory_of_another_pid_namespace_is_not_taken",
            cuda::mapped_memory_of_another_pid_namespace_is_not_taken,
        ),
        (
            "an_older_driver_is_given_code_that_it_can_load",
            cuda::an_older_driver_is_given_code_that_it_can_load,
        ),
        (
            "an_older_driver_is_given_code_from_a_named_folder",
            cuda::an_older_driver_is_given_code_from_a_named_folder,
        ),
        (
            "code_that_is_too_new_is_refused_by_the_driver",
            cuda::code_that_is_too_new_is_refused_by_the_driver,
        ),
        ("kernels_that_do_not_start_fail", cuda::kernels_that_do_not_start_fail),
        (
            "kernels_that_do_not_start_disturb_no_other",
            cuda::kernels_that_do_not_start_disturb_no_other,
        ),
        ("kernels_that_break_fail", cuda::kernels_that_break_fail),
        ("launches_do_not_overlap_what_is_filled", cuda::launches_do_not_overlap_what_is_filled),
        ("no_memory_is_an_error_and_leaks_nothing", cuda::no_memory_is_an_error_and_leaks_nothing),
        (
            "programs_longer_than_staging_have_memory_of_their_own",
            cuda::programs_longer_than_staging_have_memory_of_their_own,
        ),
        ("answers_that_say_nothing_are_no_end", cuda::answers_that_say_nothing_are_no_end),
        (
            "waiting_outlasts_answers_that_say_nothing",
            cuda::waiting_outlasts_answers_that_say_nothing,
        ),
    ]
}

/// What only `nixl` with the memory of a card promises, on the stand-in for a driver.
pub(crate) fn for_nixl_twin() -> Vec<Promise> {
    let mut all = of_packing::<NixlTwinEnd, NixlTcpEnd>();
    all.extend([
        (
            "cards_that_refuse_are_read_directly",
            card_packing::cards_that_refuse_are_read_directly as fn(),
        ),
        (
            "cards_without_the_kernel_are_read_directly",
            card_packing::cards_without_the_kernel_are_read_directly,
        ),
        (
            "cards_without_memory_are_read_directly",
            card_packing::cards_without_memory_are_read_directly,
        ),
        ("cards_that_come_later_are_packed", card_packing::cards_that_come_later_are_packed),
    ]);
    all
}

/// What `tcp` promises of a card's memory.
pub(crate) fn for_tcp_twin() -> Vec<Promise> {
    let mut all = of_packing::<TcpTwinEnd, TcpEnd>();
    all.extend([
        ("cards_that_refuse_fail_the_read", card_packing::cards_that_refuse_fail_the_read as fn()),
        (
            "cards_that_cannot_be_read_are_refused",
            card_packing::cards_that_cannot_be_read_are_refused,
        ),
    ]);
    all
}

/// What is promised wherever a card packs.
fn of_packing<C, H>() -> Vec<Promise>
where
    C: BackEnd<Memory = CardMemory>,
    H: BackEnd<Memory = HostMemory>,
{
    vec![
        (
            "kernels_that_are_late_are_waited_for",
            card_packing::kernels_that_are_late_are_waited_for::<C>,
        ),
        (
            "answers_that_say_nothing_are_no_end",
            card_packing::answers_that_say_nothing_are_no_end::<C>,
        ),
        (
            "kernels_in_flight_keep_the_destination",
            card_packing::kernels_in_flight_keep_the_destination::<C>,
        ),
        ("kernels_that_break_fail_the_read", card_packing::kernels_that_break_fail_the_read::<C>),
        (
            "a_card_and_a_host_pack_for_each_other",
            card_packing::a_card_and_a_host_pack_for_each_other::<C, H>,
        ),
    ]
}

/// What only `nixl` promises, and why it keeps destinations in quarantine.
pub(crate) fn for_nixl_tcp() -> Vec<Promise> {
    vec![
        ("other_metadata_is_loaded", nixl::other_metadata_is_loaded),
        ("a_missing_plugin_is_named", nixl::a_missing_plugin_is_named),
        ("segments_without_room_are_refused", nixl::segments_without_room_are_refused),
        ("released_requests_of_nixl_land_late", nixl::released_requests_of_nixl_land_late),
    ]
}
