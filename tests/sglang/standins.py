"""SGLang on a CPU from its wheel alone: stand-ins for kernels that the wheel has for GPUs only.

The pools, and everything that happens to them, stay SGLang's own; only the arithmetic is done here (`arithmetic.py`).
Without `convert_weight_packed` among the operators of sgl-kernel, SGLang takes its own torch code wherever it has any.
"""

import pkgutil
import sys
import types

import arithmetic
import torch

#: Modules of `sglang.srt.models` that the tests' models are in: to import all of them takes longer than all else.
MODELS = ("qwen3", "qwen2", "llama", "gemma3_causal", "deepseek_v2", "nemotron_h", "falcon_h1", "qwen3_5_text", "qwen3_5",
          "qwen3_next", "lfm2", "kimi_linear")
#: Operators that models look up by name.
OPERATORS = (
    arithmetic.fused_gdn_gating_cpu,
    arithmetic.fused_sigmoid_gating_delta_rule_update_cpu,
    arithmetic.chunk_gated_delta_rule_cpu,
    arithmetic.fused_qk_gemma_rmsnorm_cpu,
    arithmetic.fused_qk_gemma_rmsnorm_with_gate_cpu,
    arithmetic.fused_sigmoid_mul_cpu,
    arithmetic.fused_qkvzba_split_reshape_cat_contiguous_cpu,
)


def assign_req_to_token_pool_cpu(rows, table, starts, ends, places, _width):
    """The places of each request's new tokens, into its row of the table."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def _absent(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*given, **_):
        shapes = [tuple(it.shape) if torch.is_tensor(it) else it for it in given]
        raise NotImplementedError(f"there is no stand-in for sgl_kernel.{name}{shapes}")

    return absent


def install():
    """Before SGLang is imported."""
    _kernels()
    for made in OPERATORS:
        setattr(torch.ops.sgl_kernel, made.__name__, made)
    # Looked up when a module is imported, and not used by these models.
    torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_cpu = _absent("fused_qkvzba_split_reshape_cat_cpu")
    _models()
    _recurrent()
    _ranks()


def _kernels():
    """The package `sgl_kernel`, as far as it is imported without being asked for."""
    kernels, mamba = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.mamba")
    kernels.__version__, kernels.__path__ = "0.4.10", []
    kernels.__getattr__ = mamba.__getattr__ = _absent
    kernels.mamba = mamba
    kernels.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    mamba.causal_conv1d_fn_cpu = arithmetic.causal_conv1d_fn
    mamba.causal_conv1d_update_cpu = arithmetic.causal_conv1d_update
    mamba.chunk_gated_delta_rule_cpu = arithmetic.chunk_gated_delta_rule_cpu
    mamba.fused_gdn_gating_cpu = arithmetic.fused_gdn_gating_cpu
    mamba.fused_sigmoid_gating_delta_rule_update_cpu = arithmetic.fused_sigmoid_gating_delta_rule_update_cpu
    sys.modules["sgl_kernel"], sys.modules["sgl_kernel.mamba"] = kernels, mamba


def _models():
    given = pkgutil.iter_modules

    def iter_modules(path=None, prefix=""):
        for it in given(path, prefix):
            package, _, name = it.name.rpartition(".")
            if package != "sglang.srt.models" or name in MODELS:
                yield it

    pkgutil.iter_modules = iter_modules


def _recurrent():
    """These modules name kernels of Triton when they are imported."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels import kda_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d, mamba

    for module in (causal_conv1d, kda_backend, mamba):
        module.causal_conv1d_fn = arithmetic.causal_conv1d_fn
        module.causal_conv1d_update = arithmetic.causal_conv1d_update
    mamba.causal_conv1d_fn_triton = arithmetic.causal_conv1d_fn
    mamba.causal_conv1d_update_triton = arithmetic.causal_conv1d_update
    mamba.mamba_chunk_scan_combined = arithmetic.mamba_chunk_scan_combined
    mamba.selective_state_update = arithmetic.selective_state_update
    kda_triton.chunk_kda = arithmetic.chunk_kda
    kda_triton.fused_sigmoid_gating_delta_rule_update = arithmetic.fused_sigmoid_gating_delta_rule_update_cpu
    layernorm_gated.layernorm_fn = _gated_norm


def _ranks():
    """Several ranks: the wheel wants NCCL for a group of them, also on a CPU, where gloo is what it uses then."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.mamba import mamba

    given = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = lambda *words, **named: given(*words, **named | {"use_pynccl": False})
    # On a CPU its loader cannot repeat a group for several ranks, as it does elsewhere.
    mamba.is_cpu = lambda: False


def _gated_norm(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, **_):
    """SGLang's own reference."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_ref

    z = None if z is None else z.reshape(x.shape)
    return rms_norm_ref(x, weight, bias, z, eps, group_size, norm_before_gate)
