"""What the back end touches of SGLang: nothing of it is promised by anybody.

One table, so that a version of SGLang in which something has moved is met by its name when an engine starts (and in
`tests/sglang/test_inside.py`), and not by an error at some request. What a file imports by name is here, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._inside import is_there
from .settings import REFUSED

DISAGGREGATION = "sglang.srt.disaggregation"
#: By module: what of it is used.
TABLE: dict[str, str] = {
    "sglang": "__version__",
    # The plug-in's own doors, and the hooks.
    "sglang.srt.arg_groups.choices": "add_disagg_transfer_backend_choices",
    "sglang.srt.plugins.hook_registry": "HookRegistry.register HookType.AROUND HookType.AFTER",
    f"{DISAGGREGATION}.utils": "get_kv_class TransferBackend.FAKE KVClassType.MANAGER KVClassType.SENDER "
    "KVClassType.RECEIVER KVClassType.BOOTSTRAP_SERVER KVClassType.KVARGS MetadataBuffers.get_buf_infos "
    "MetadataBuffers.bootstrap_room MetadataBuffers.output_ids DisaggregationMode.PREFILL",
    f"{DISAGGREGATION}.prefill": "PrefillBootstrapQueue._init_kv_manager PrefillBootstrapQueue.create_sender "
    "PrefillBootstrapQueue.scheduler PrefillBootstrapQueue.token_to_kv_pool "
    "PrefillBootstrapQueue.draft_token_to_kv_pool PrefillBootstrapQueue.metadata_buffers "
    "SchedulerDisaggregationPrefillMixin._send_kv_chunk",
    f"{DISAGGREGATION}.decode": "DecodePreallocQueue._init_kv_manager DecodePreallocQueue._create_receiver_and_enqueue "
    "DecodePreallocQueue.scheduler DecodePreallocQueue.token_to_kv_pool DecodePreallocQueue.draft_token_to_kv_pool "
    "DecodePreallocQueue.metadata_buffers DecodeRequest.kv_receiver DecodeRequest.is_rebootstrap "
    "DecodeTransferQueue.enable_deferred_kv_release DecodeTransferQueue.deferred_kv_release_timeout "
    "DecodeTransferQueue._defer_release DecodeTransferQueue.resolve_deferred_releases",
    f"{DISAGGREGATION}.base.conn": "BaseKVBootstrapServer BaseKVManager BaseKVReceiver BaseKVSender KVPoll.Failed "
    "KVPoll.Bootstrapping KVPoll.WaitingForInput KVPoll.Transferring KVPoll.Success KVTransferMetric "
    "KVArgs.page_size KVArgs.state_types",
    f"{DISAGGREGATION}.common.conn": "CommonKVSender._early_send_wait_event CommonKVReceiver.abort_notified "
    "CommonKVReceiver.ensure_abort_notified",
    # Requests.
    "sglang.srt.managers.schedule_batch": "Req.rid Req.origin_input_ids Req.extra_key Req.disagg_kv_sender "
    "Req.sampling_params Req.return_logprob",
    "sglang.srt.managers.scheduler": "Scheduler.model_config Scheduler.sliding_window_size Scheduler.transfer_backend "
    "Scheduler.tp_worker",
    # Pools, and what lies in them.
    "sglang.srt.mem_cache.memory_pool": "KVCache MHATokenToKVPool.k_buffer MHATokenToKVPool.v_buffer "
    "MHATokenToKVPool.model_layer_ids MHATokenToKVPool.kv_cache_layout MHATokenToKVPool.is_quantized_kv_cache "
    "MHATokenToKVPool.post_capture_active KVCache.size KVCache.page_size KVCache.store_dtype KVCache.dtype "
    "MLATokenToKVPool.kv_buffer MLATokenToKVPool.model_layer_ids HybridLinearKVPool.full_kv_pool "
    "HybridLinearKVPool.mamba_pool MambaPool.mamba_cache MambaPool.mamba_layer_ids MambaPool._slot_siblings",
    "sglang.srt.mem_cache.swa_memory_pool": "SWAKVPool.full_kv_pool SWAKVPool.swa_kv_pool SWAKVPool.full_layer_nums",
    # The model, and how it is divided.
    "sglang.srt.configs.hybrid_arch": "mambaish_config",
    "sglang.srt.configs.model_config": "ModelConfig.get_total_num_kv_heads ModelConfig.hf_text_config "
    "ModelConfig.hf_config ModelConfig.model_path ModelConfig.dtype",
    "sglang.srt.configs.mamba_utils": "Mamba2StateShape.conv_shard_groups Mamba2StateShape.state_size "
    "KimiLinearStateShape.conv_slice_axis",
    "sglang.srt.runtime_context": "get_parallel get_disagg",
    "sglang.srt.server_args": "ServerArgs.dp_size ServerArgs.disaggregation_decode_host_receive_threshold "
    "ServerArgs.disaggregation_decode_allocation_policy ServerArgs.disaggregation_decode_enable_radix_cache "
    "ServerArgs.enable_metrics " + " ".join(f"ServerArgs.{name}" for name in REFUSED),
    "sglang.srt.utils.network": "get_local_ip_auto",
}


def names() -> Iterator[tuple[str, str]]:
    for module, used in TABLE.items():
        for name in used.split():
            yield module, name


def missing() -> list[str]:
    """Names that are not in this SGLang: `module name`."""
    return [f"{module} {name}" for module, name in names() if not is_there(module, name)]
