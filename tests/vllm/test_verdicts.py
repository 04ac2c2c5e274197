"""The refusals that kvferry's verdicts name, asked of the installed vLLM's own functions."""

from types import SimpleNamespace

import pytest
import reference
from stand_in import order_convolutions as order
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
    derive_mamba_conv_split,
)
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.models import registry


def topology(**facts):
    made = object.__new__(TransferTopology)
    for name, value in facts.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (6, 4), (2, 3)])
def test_tensor_parallelism_that_does_not_divide(prefill, decode):
    with pytest.raises(AssertionError, match="not divisible"):
        topology(tp_size=decode).tp_ratio(prefill)


@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (2, 4), (3, 3)])
def test_tensor_parallelism_that_divides(prefill, decode):
    assert topology(tp_size=decode).tp_ratio(prefill) != 0


def test_larger_prefill_blocks():
    assert topology(block_size=32).block_size_ratio(16) == 2
    with pytest.raises(AssertionError, match="not divisible"):
        topology(block_size=16).block_size_ratio(32)


@pytest.mark.parametrize("sort", ["short conv", "linear"])
def test_states_without_a_split(sort):
    order("DS")
    spec = SimpleNamespace(mamba_type=reference.MAMBA_TYPES[sort], shapes=[(8, 3)])
    with pytest.raises(NotImplementedError):
        derive_mamba_conv_split(spec, 1)


def test_convolutions_stored_columns_first():
    order("SD")
    spec = SimpleNamespace(mamba_type=reference.MAMBA_TYPES["mamba2"], shapes=[(3, 8), (1, 4, 4)])
    with pytest.raises(AssertionError, match="DS conv state layout"):
        derive_mamba_conv_split(spec, 1)


def test_families_that_are_gone():
    for architecture in reference.GONE:
        assert architecture in registry._PREVIOUSLY_SUPPORTED_MODELS


def test_one_mamba_group_is_split_although_it_is_replicated():
    """With one group, two ranks hold B and C whole; the connector takes them for halves of two."""
    order("DS")
    shapes = mamba_utils.MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=2,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    spec = SimpleNamespace(
        mamba_type=reference.MAMBA_TYPES["mamba2"],
        shapes=shapes,
        dtypes=[reference.torch.bfloat16, reference.torch.bfloat16],
    )
    # Each rank's B has 8 channels, all of the group's; the whole model has 8, not 16.
    assert tuple(derive_mamba_conv_split(spec, 2).local_proj_dims) == (32, 8, 8)
