"""The metadata row of a request, as SGLang itself fills and reads it."""

from types import SimpleNamespace

import pytest
import torch
from kvferry._first import First
from kvferry.sglang import rows
from sglang.srt.disaggregation.utils import MetadataBuffers

ROOM = 2**62 + 3


def buffers(**changes):
    return MetadataBuffers(**{"size": 6, "hidden_size": 16, "hidden_states_dtype": torch.bfloat16, "max_sampling_mask_tokens": 8} | changes)


def request(row):
    """As much of a request as SGLang takes for its row."""
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-0.25], output_token_logprobs_idx=[17],
        output_top_logprobs_val=[[-0.25, -3.5]], output_top_logprobs_idx=[[17, 4]],
    )
    return SimpleNamespace(
        metadata_buffer_index=row, output_ids=[17], cached_tokens=5, cached_tokens_device=3, cached_tokens_host=2,
        cached_tokens_storage=0, get_mm_token_counts=lambda: (7, 0, 0), return_logprob=True, logprob=logprob,
        return_sampling_mask=False, hidden_states_tensor=None, bootstrap_room=ROOM,
    )


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_all_that_sglang_wrote_is_in_the_other_engines_row():
    there, here = buffers(), buffers()
    there.set_buf(request(2))
    made = rows.enclosed(there, 2, True)
    assert len(made) < 16 << 10
    before = [here.get_buf(row) for row in range(6)]
    rows.fill(here, 4, First.read(made), ROOM, True)
    assert same(here.get_buf(4), there.get_buf(2))
    # And nothing in another's.
    assert all(same(here.get_buf(row), before[row]) for row in range(6) if row != 4)


def test_the_first_token_of_another_engine_leaves_nothing_of_the_row_before():
    here = buffers()
    here.set_buf(request(1))
    rows.fill(here, 1, First(99, "vLLM", True), ROOM, False)
    read = here.get_buf(1)
    assert (read[0].tolist(), read[-1][0].item()) == ([99] + [0] * 15, ROOM)
    assert not any(it.any() for it in read[1:-1] if it is not None)
    with pytest.raises(ValueError, match="sampled by vLLM, which does not say how likely"):
        rows.fill(here, 1, First(99, "vLLM", True), ROOM, True)


def test_rows_of_another_version_are_refused_by_name():
    there, here = buffers(max_top_logprobs_num=64), buffers()
    there.set_buf(request(0))
    with pytest.raises(ValueError, match=r"another version.*output_top_logprobs_idx is \('torch.int32', 256\) there and .*512"):
        rows.fill(here, 0, First.read(rows.enclosed(there, 0, True)), ROOM, False)
