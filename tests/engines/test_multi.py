"""FerryConnector inside vLLM's MultiConnector, with statistics on: vLLM finds it by its name alone."""

import random
import time

import prometheus_client
from exact import hand_over, nothing_left, prompts

#: What must have been counted for each request, by engine.
PREFILL = (("leases_granted_total", {}), ("leases_confirmed_total", {}))
DECODE = (("loads_total", {"outcome": "done"}), ("load_seconds_count", {}))


def test_a_pair_hands_over_and_is_counted(serve):
    options = {"multi": True, "disable_log_stats": False, "block_size": 32}
    prefill = serve("qwen3", "kv_producer", **options)
    decode = serve("qwen3", "kv_consumer", **options)
    asked = prompts(random.Random(16), [33, 100])
    for prompt in asked:
        moved = hand_over(prefill, decode, prompt)
        assert moved == decode.generate(prompt)[0]
    for engine, names in ((prefill, PREFILL), (decode, DECODE)):
        assert engine.call(counted, names, len(asked)) == [len(asked)] * len(names)
    nothing_left(prefill, decode)


# In the engine's process.


def counted(engine, names, wanted, seconds=30):
    """What Prometheus sees, as soon as it is what is wanted; it hears of it with the steps of requests."""
    deadline = time.monotonic() + seconds
    while True:
        engine.generate({"prompt_token_ids": [1]}, use_tqdm=False)
        seen = [value(name, labels) for name, labels in names]
        if all(one >= wanted for one in seen) or time.monotonic() > deadline:
            return seen


def value(name, labels):
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:kvferry_{name}" and labels.items() <= sample.labels.items()
    )
