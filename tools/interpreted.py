"""Kernels of any vLLM's source, carried out by Triton's interpreter: without importing that vLLM."""

import os

# Before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

# isort: split
import ast
import builtins
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import triton
import triton.language as tl
import vllm
from kvferry.vllm.kernels.code import Code


@triton.jit
def two_of_4_bits(low, high):
    """Two numbers as one byte of e2m1, rounded to the nearest: what an instruction of Blackwell does."""
    return _four_bits(low) | (_four_bits(high) << 4)


@triton.jit
def _four_bits(number):
    size = tl.abs(number)
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return (code | ((number < 0).to(tl.uint8) << 3)).to(tl.uint8)


CHANGED = tempfile.TemporaryDirectory()
TOOLS = Path(__file__).parent


@cache
def source(version):
    """The folder of a vLLM's source; that of the one that all tests run with, if none is named."""
    if version is None:
        return Path(vllm.__file__).parent
    python = subprocess.run([TOOLS / "vllm-env.sh", version], check=True, capture_output=True, text=True).stdout.strip()
    (found,) = Path(python).parents[1].glob("lib/python*/site-packages/vllm")
    return found


class Interpreted(Code):
    """Functions that are taken out of a vLLM's source, and all that they need of it; `given` stands in for what they
    would ask of a GPU. `edit` changes the source, which shows what a change does."""

    def __init__(self, version=None, *, edit=lambda text: text, **given):
        super().__init__(source(version))
        platform = SimpleNamespace(**dict.fromkeys(("is_cuda", "is_rocm", "is_xpu", "is_cpu"), lambda: False))
        self.given = {"triton": triton, "tl": tl, "current_platform": platform}
        self.given |= {"_fp32x2_to_fp4x2": two_of_4_bits, **given}
        self.edit, self.changed = edit, {}
        self.modules = {}

    def take(self, module, name):
        for where, made in self.of(module, name):
            self.run(where, made)
        return self.modules[module][name]

    def run(self, module, made):
        names = self.modules.setdefault(module, {"__builtins__": builtins, **self.given})
        if isinstance(made, ast.ImportFrom) and (source := self.imported(module, made)) is not None:
            for it in made.names:
                found = self.given.get(it.name, self.modules.get(source, {}).get(it.name))
                if found is not None:
                    names[it.asname or it.name] = found
            return
        if isinstance(made, ast.FunctionDef) and made.name in self.given:
            names[made.name] = self.given[made.name]
            return
        exec(compile(ast.Module([made], []), str(self.file(module)), "exec"), names)

    def bound(self, module):
        file = self.file(module)
        text = file.read_text() if file.exists() else ""
        if (changed := self.edit(text)) != text:
            # Triton reads a kernel's source from its file.
            self.changed[module] = Path(CHANGED.name, f"{len(list(Path(CHANGED.name).iterdir()))}.py")
            self.changed[module].write_text(changed)
            self.edit = lambda text: text
        return super().bound(module)

    def file(self, module):
        return self.changed.get(module) or super().file(module)


V41 = "models.deepseek_v41.common.ops"


def rope_quant_insert(version=None, **options):
    """The kernel of V4.1's compressed latents."""
    return Interpreted(version, **options).take(f"{V41}.fused_compress_quant_cache", "rope_quant_insert")


def ring_store(version=None):
    """The kernel of V4.1's open groups."""
    return Interpreted(version).take(f"{V41}.fused_compress_quant_cache", "fused_save_compress_norm")


def indexer_store(version=None, *, exponents=False, **options):
    """The kernel of V4.1's indexer; `exponents` as on Blackwell since 0.33."""
    given = {"mqa_logits_use_mx_scales": lambda: exponents, **options}
    return Interpreted(version, **given).take(f"{V41}.indexer_k_store", "indexer_k_norm_rope_store")


def running(backend, **functions):
    """As much of a layer as is asked: it and its compressor call kernels by the names that their files have."""
    file = ModuleType(f"layers_{len(sys.modules)}")
    vars(file).update(functions)
    sys.modules[file.__name__] = file
    named = type(backend, (), {"get_name": staticmethod(lambda: backend)})
    layer = {"get_attn_backend": lambda self: named, "bind_kv_cache": lambda self, cache: None}
    made = type("Layer", (), {"__module__": file.__name__, **layer})()
    made.compressor = made
    return made
