"""The scheduler's side of an engine with one layer of attention, and requests for it, without an engine."""

from types import SimpleNamespace

import torch
from kvferry.vllm.options import Options
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus


def start_side(kind, engine=None, *, role="kv_both", ranks=1, tracer=None, kv_load_failure_policy="fail", **options):
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    named = {} if engine is None else {"engine_id": engine}
    named["kv_load_failure_policy"] = kv_load_failure_policy
    transfer = KVTransferConfig(kv_connector="FerryConnector", kv_role=role, **named)
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_size=ranks,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(multimodal_config=None, max_model_len=320),
        num_prefill_lookahead_tokens=0,
        speculative_config=None,
    )
    more = {"tracer": tracer} if tracer else {}
    return kind(config, cache, Options.read({"lease_seconds": 600.0} | options), **more)


def request(name="request-1", trace_headers=None, **params):
    """Of 40 tokens, all computed."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        sampling_params=SimpleNamespace(extra_args={"kv_transfer_params": params}),
        trace_headers=trace_headers,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_prompt_tokens=40,
        num_computed_tokens=40,
        num_in_flight_tokens=0,
        num_output_tokens=0,
        num_preemptions=0,
        prompt_token_ids=list(range(40)),
        all_token_ids=list(range(40)),
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        mm_features=None,
        resumable=False,
    )


def blocks(ids):
    """What vLLM has given to a request."""
    given = [SimpleNamespace(block_id=id, block_hash_num_tokens=0) for id in ids]
    return SimpleNamespace(blocks=(given,), get_block_ids=lambda: (list(ids),))
