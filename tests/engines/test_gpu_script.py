"""What `tools/check-gpu-vllm.sh` runs on a GPU, run here without one: the script itself must not rot."""

import gpu_handover


def test_it_passes_on_a_pair_that_is_right(serve, capsys):
    watched = {"prepare": [gpu_handover.watch], "extra": {"audit": "all", "least_ahead": 0.0}}
    pushes = gpu_handover.PUSH | {"extra": {"audit": "all", "push": "always"}}
    prefill = serve("qwen3", "kv_producer", block_size=32, **watched | pushes)
    decode = serve("qwen3", "kv_consumer", block_size=96, **watched)
    gpu_handover.check("qwen3", prefill, decode, pushes=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("qwen3: every token right, 43 loads")
    assert "all audited" in line and "MiB in" in line and "GB/s" in line
    # Poison is poison: what is not moved is NaN.
    decode.call(gpu_handover.poison)
    assert decode.call(is_poisoned)


def is_poisoned(engine):
    return all(bool((storage == 0xFF).all()) for storage in gpu_handover.SIDES[0].storages)
