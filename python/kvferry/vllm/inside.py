"""What the connector touches of vLLM beside the hooks of a connector: nothing of it is promised by anybody.

One table, so that a version of vLLM in which something has moved is met by its name (`tests/python/test_inside.py`,
`tools/new-vllm.sh`), and not by an error at some request. What a file imports by name is here, too.
Not here, because its module loads on AMD's GPUs alone: `RocmAiterUnifiedAttentionImpl._shuffle_kv_layout`, since 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._inside import is_there
from . import versions

V1 = "vllm.v1"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
MAMBA = "vllm.model_executor.layers.mamba"
#: By module: what of it is used. All of it was seen in all versions that were tried but for what `SEEN` says.
TABLE: dict[str, str] = {
    # Written to: how far windows may be taken for the prefixes of other requests.
    f"{V1}.core.single_type_kv_cache_manager": "SingleTypeKVCacheManager.num_cached_block "
    "SingleTypeKVCacheManager.block_size",
    # Written to: a prompt without its last tokens, which are D's to compute.
    f"{V1}.request": "Request.prompt_token_ids Request.prompt_embeds Request.prompt_is_token_ids "
    "Request._all_token_ids Request.num_prompt_tokens Request.max_tokens Request.kv_transfer_params "
    # Read.
    "Request.num_computed_tokens Request.num_in_flight_tokens Request.num_preemptions Request.status "
    "Request.get_skip_reading_prefix_cache Request.abort_immediately Request.resumable Request.all_token_ids "
    "Request.lora_request Request.cache_salt Request.mm_features Request.sampling_params "
    "RequestStatus.RUNNING RequestStatus.FINISHED_LENGTH_CAPPED RequestStatus.FINISHED_STOPPED",
    f"{V1}.core.kv_cache_manager": "KVCacheManager.coordinator KVCacheManager.block_pool KVCacheManager.get_block_ids "
    "KVCacheBlocks.get_block_ids KVCacheBlocks.blocks",
    f"{V1}.core.kv_cache_coordinator": "KVCacheCoordinator.single_type_managers",
    f"{V1}.core.kv_cache_utils": "KVCacheBlock.block_hash_num_tokens",
    f"{V1}.core.block_pool": "BlockPool.get_num_free_blocks BlockPool.num_gpu_blocks",
    f"{V1}.core.sched.output": "SchedulerOutput.num_scheduled_tokens SchedulerOutput.total_num_scheduled_tokens "
    "SchedulerOutput.new_block_ids_to_zero SchedulerOutput.kv_cache_block_copies",
    f"{V1}.outputs": "KVConnectorOutput.finished_recving KVConnectorOutput.failed_recving "
    "KVConnectorOutput.finished_sending KVConnectorOutput.kv_connector_worker_meta",
    f"{V1}.kv_cache_interface": "KVCacheConfig.num_blocks KVCacheConfig.kv_cache_groups "
    "KVCacheConfig.transfer_group_ids KVCacheConfig.select_transfer_block_ids KVCacheGroupSpec.enable_kv_transfer "
    "KVCacheSpec.max_memory_usage_bytes KVCacheSpec.page_size_bytes KVCacheSpec.dcp_sharded "
    "KVCacheSpec.prefix_replay_tokens AttentionSpec.kv_quant_mode AttentionSpec.tokens_per_state "
    "AttentionSpec.state_content_size_bytes MLAAttentionSpec.cache_dtype_str MLAAttentionSpec.model_version "
    "MLAAttentionSpec.cache_role "
    "MambaSpec.mamba_type MambaSpec.shapes MambaSpec.dtypes UniformTypeKVCacheSpecs.kv_cache_specs",
    # Layers of the running engine: their specs, back ends, kernels and scales.
    "vllm.config.compilation": "CompilationConfig.static_forward_context",
    "vllm.model_executor.layers.attention.attention": "Attention.get_kv_cache_spec Attention.get_attn_backend "
    "Attention.bind_kv_cache Attention.kv_cache_dtype Attention.impl set_default_quant_scales",
    f"{V1}.attention.backend": "AttentionBackend.get_name AttentionBackend.get_impl_cls "
    "AttentionBackend.forward_includes_kv_cache_update",
    f"{V1}.attention.backends.cpu_attn": "_get_attn_isa CPUAttentionBackend CPUAttentionBackendImpl.do_kv_cache_update",
    f"{V1}.attention.backends.mla.sparse_swa": "DeepseekV4SWACache",
    f"{V1}.attention.backends.registry": "AttentionBackendEnum",
    "vllm.models.deepseek_v41.attention": "indexer_k_norm_rope_store",
    "vllm.models.deepseek_v41.compressor": "rope_quant_insert fused_save_compress_norm",
    f"{V1}.attention.ops.rocm_paged_mxfp4_indexer": "rocm_paged_mxfp4_cache_layout",
    f"{MAMBA}.mamba_utils": "is_conv_state_dim_first get_conv_state_layout",
    f"{MAMBA}.ops.causal_conv1d": "causal_conv1d_fn",
    f"{MAMBA}.ops.cpu.gdn_attention": "_causal_conv1d_fwd_cpu _ssm_state_view causal_conv1d_torch",
    "vllm._custom_ops": "indexer_k_quant_and_cache fused_sigmoid_gating_delta_rule_update_cpu",
    "vllm.utils.deep_gemm": "mqa_logits_use_mx_scales",
    # The engine as a whole.
    "vllm": "__version__",
    "vllm.config": "KVTransferConfig get_current_vllm_config_or_none",
    "vllm.config.speculative": "SpeculativeConfig.uses_draft_kv_cache",
    "vllm.config.vllm": "VllmConfig.num_prefill_lookahead_tokens",
    "vllm.distributed.parallel_state": "get_pp_group get_pcp_group get_tensor_model_parallel_rank "
    "GroupCoordinator.cpu_group GroupCoordinator.is_first_rank GroupCoordinator.rank_in_group",
    "vllm.model_executor.models": "ModelRegistry ModelRegistry.resolve_model_cls",
    "vllm.platforms": "current_platform",
    "vllm.plugins": "load_general_plugins",
    "vllm.utils.network_utils": "get_ip",
    # Connectors: what ours is made of, and vLLM's own.
    f"{CONNECTORS}.factory": "KVConnectorFactory KVConnectorFactory.supports_hma_config "
    "KVConnectorFactory.get_connector_class KVConnectorFactory.get_connector_class_by_name",
    f"{CONNECTORS}.utils": "get_current_attn_backends",
    f"{CONNECTORS}.v1.base": "KVConnectorBase_V1 KVConnectorBase_V1._get_connector_metadata "
    "KVConnectorBase_V1._kv_cache_config KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorRole "
    "KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA",
    f"{CONNECTORS}.v1.metrics": "KVConnectorPromMetrics KVConnectorPromMetrics.per_engine_labelvalues KVConnectorStats",
    f"{CONNECTORS}.v1.nixl": "NixlConnector metadata",
    f"{CONNECTORS}.v1.nixl.metadata": "NIXL_CONNECTOR_VERSION compute_nixl_compatibility_hash",
}
#: What is not in all versions that were tried, and in which it was seen: the connector does without.
SEEN: dict[str, tuple[str, ...]] = {
    "vllm.v1.attention.ops.rocm_paged_mxfp4_indexer rocm_paged_mxfp4_cache_layout": ("0.32", "0.33"),
    "vllm.utils.deep_gemm mqa_logits_use_mx_scales": ("0.33",),
    "vllm.models.deepseek_v41.attention indexer_k_norm_rope_store": ("0.32", "0.33"),
    "vllm.models.deepseek_v41.compressor rope_quant_insert": ("0.32", "0.33"),
    "vllm.models.deepseek_v41.compressor fused_save_compress_norm": ("0.32", "0.33"),
}


def names() -> Iterator[tuple[str, str]]:
    for module, used in TABLE.items():
        for name in used.split():
            yield module, name


def missing() -> list[str]:
    """Names that are not in this vLLM, though they are in those that were tried: `module name`."""
    version = versions.minor(versions.running())
    newest = version if versions.is_tried(version) else versions.TRIED[-1]
    return [
        f"{module} {name}"
        for module, name in names()
        if newest in SEEN.get(f"{module} {name}", versions.TRIED) and not is_there(module, name)
    ]
