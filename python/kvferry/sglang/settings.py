"""Settings of SGLang with which nothing was tried: refused by their names when an engine starts."""

from __future__ import annotations

from typing import Any

from .._refusal import refuse

#: By the name of the argument: what it would mean. What is off, or left out, is none of these.
REFUSED = {
    "speculative_algorithm": "the caches of draft models are not handed over",
    "enable_lora": "adapters are known by other names to each engine",
    "enable_hierarchical_cache": "HiCache moves pages between the GPU and host memory",
    "enable_hisparse": "HiSparse moves pages between the GPU and host memory",
    "enable_unified_memory": "the pages of a unified pool move",
    "enable_page_major_kv_layout": "all layers of a page lie together",
    "enable_memory_saver": "the memory of the pools is given back while the engine sleeps",
    "enable_pd_role_switch": "an engine stays what it was started as",
    "enable_pdmux": "prefill and decode share one pool",
    "enable_linear_replayssm": "states are spread over several tensors",
    "enable_linear_replayssm_spec": "states are spread over several tensors",
    "enable_int8_mamba_checkpoint": "states are kept in 8 bits",
    "enable_kv_cache_sharding": "pages are dealt out to several ranks",
    "enable_dsa_cache_layer_split": "layers are dealt out to several ranks",
    "enable_two_batch_overlap": "steps overlap in a way that was not looked at",
    "disaggregation_decode_enable_offload_kvcache": "pages are moved to host memory",
    "disaggregation_enable_kv_checksum": "SGLang's checksum is of another layout's bytes; kvferry's option 'audit' compares values",
    "optimistic_prefill_attempts": "a prompt may be given up when it is computed",
}
#: By the name of the size: how an engine is divided other than by tensor parallelism.
DIVIDED = {
    "pp_size": "pipeline parallelism",
    "attn_dp_size": "data-parallel attention",
    "attn_cp_size": "context parallelism",
    "attn_dcp_size": "context parallelism in decode",
}


def refuse_settings(server_args: Any, parallel: Any) -> None:
    for name, why in REFUSED.items():
        if value := getattr(server_args, name):
            flag = f"--{name.replace('_', '-')}"
            raise refuse("", f"kvferry does not serve SGLang with {flag} ({value}): {why}. Leave it out")
    for name, what in DIVIDED.items():
        if (size := getattr(parallel, name)) > 1:
            raise refuse("", f"kvferry does not serve SGLang with {what} ({name} is {size}): use tensor parallelism alone")
    if server_args.dp_size > 1:
        raise refuse("", f"kvferry does not serve SGLang with --dp-size {server_args.dp_size}: start one server for each")
    if server_args.disaggregation_decode_host_receive_threshold < 1:
        raise refuse("", "kvferry reads into the pools alone: leave out --disaggregation-decode-host-receive-threshold")
    if server_args.disaggregation_decode_allocation_policy != "early":
        # What it is for is what happens anyway.
        raise refuse("", "leave out --disaggregation-decode-allocation-policy: KVFERRY_OPTIONS has the option 'pages' for it")
