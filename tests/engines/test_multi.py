"""FerryConnector inside vLLM's MultiConnector, with statistics on: vLLM finds it by its name alone."""

import prometheus_client
from exact import check

LENGTHS = (33, 100)


def test_a_pair_hands_over_and_is_counted(serve):
    options = {"multi": True, "disable_log_stats": False, "block_size": 32}
    prefill = serve("qwen3", "kv_producer", **options)
    decode = serve("qwen3", "kv_consumer", **options)
    check(prefill, decode, LENGTHS)
    # With the control.
    count = len(LENGTHS) + 1
    assert prefill.call(counted, "leases_granted_total") == count
    assert prefill.call(counted, "leases_confirmed_total") == count
    assert decode.call(counted, "loads_total", outcome="done") == count
    assert decode.call(counted, "load_seconds_count") == count


def counted(engine, name, **labels):
    """What Prometheus would see of one metric."""
    # What has happened since the last step is counted with the next one.
    engine.generate({"prompt_token_ids": [1]}, use_tqdm=False)
    engine.llm_engine.do_log_stats()
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:kvferry_{name}" and labels.items() <= sample.labels.items()
    )
