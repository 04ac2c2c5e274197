"""How SGLang's own back ends cut a convolution's state where the tensor parallelism differs, beside our plan, byte for byte:
the same for gated delta rules and KDA, and for Mamba2 not, which is what `docs/sglang.md` says of it."""

import numpy as np
import pytest
from kvferry import compile
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks
from test_describe import engine

SOURCE_SLOT, SLOT = 3, 2


def ours(sources, destination):
    """Where each byte of D's state comes from, by our plan."""
    plan = compile(destination.manifest, [source.manifest for source in sources])
    tables = [[np.array([slot if table.source == "component" else 1]) for table in destination.tables] for slot in (SOURCE_SLOT, SLOT)]
    found = plan.copies(tokens=1, source_blocks=tables[0], destination_blocks=tables[1])
    return {at + i: source + i for copies in found for source, at, length in copies.tolist() for i in range(length)}


def theirs(case, pools, source_ranks, pool, ranks, rank):
    """The same of the first layer's convolution, by SGLang's function and its word on the sections."""
    by_column = case == "KDA"
    groups = {"GDN": [16, 16, 32], "KDA": [32, 32, 32]}.get(case)
    found = {}
    conv = pool.mamba_pool.mamba_cache.conv[0][0]
    for number, source_pool in enumerate(pools):
        # Who sends what to whom: each rank of the larger side has one partner.
        if source_ranks < ranks and number != rank * source_ranks // ranks:
            continue
        source = source_pool.mamba_pool.mamba_cache.conv[0][0]
        shapes = [it.shape[1:] if by_column else reversed(it.shape[1:]) for it in (source, conv)]
        (outer, source_dim), (_, dim) = shapes
        blocks = compute_mamba_state_slice_byte_blocks(
            src_item_len=source[0].nbytes, dst_item_len=conv[0].nbytes, src_dim=source_dim, dst_dim=dim,
            outer_count=outer if by_column else 1, src_attn_tp_size=source_ranks, dst_attn_tp_size=ranks,
            dst_tp_rank_in_group=rank, local_tp_rank_in_group=number, conv_shard_groups=groups,
        )
        for begin, at, length in blocks:
            for i in range(length):
                found[conv[SLOT].data_ptr() + at + i] = source[SOURCE_SLOT].data_ptr() + begin + i
    return found


@pytest.mark.parametrize(("source_ranks", "ranks"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("case", ["GDN", "KDA", "Mamba2", "Mamba2, one group"])
def test_the_plan_is_sglangs_own_where_that_is_right(case, source_ranks, ranks):
    sources, source_pools = engine(case, 1, source_ranks)
    destinations, pools = engine(case, 1, ranks)
    wrong = 0
    for rank, (destination, pool) in enumerate(zip(destinations, pools, strict=True)):
        planned, own = ours(sources, destination), theirs(case, source_pools, source_ranks, pool, ranks, rank)
        state = pool.mamba_pool.mamba_cache.conv[0][0][SLOT]
        inside = range(state.data_ptr(), state.data_ptr() + state.nbytes)
        assert set(inside) <= planned.keys()
        wrong += sum(planned[at] != own.get(at) for at in inside)
    if case in ("GDN", "KDA"):
        assert wrong == 0
    else:
        # Its sections are not known to it: x, B and C of each rank.
        assert wrong > 0
