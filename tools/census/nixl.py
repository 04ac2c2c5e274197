"""What vLLM's own connector (NixlConnector) does with each, and the line of its source that shows it."""

from .source import SOURCE

NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"

#: What NixlConnector does, why, and the file and the text in it that show it.
PAGES_BY_BLOCK = (
    "serves",
    "moves whole blocks",
    f"{NIXL}/tp_mapping.py",
    "return issubclass(spec_type, AttentionSpec)",
)
NIXL_SPECS = {
    "FullAttentionSpec": PAGES_BY_BLOCK,
    "RSWASpec": PAGES_BY_BLOCK,
    "SinkFullAttentionSpec": PAGES_BY_BLOCK,
    "ChunkedLocalAttentionSpec": PAGES_BY_BLOCK,
    "CrossAttentionSpec": (
        "refuses",
        "vLLM runs no encoder-decoder model with a connector",
        "v1/core/sched/scheduler.py",
        "Encoder-decoder models are not currently supported with KV connectors",
    ),
    "HiddenStateCacheSpec": PAGES_BY_BLOCK,
    "SlidingWindowSpec": (
        "serves",
        "moves the last blocks that a window may reach",
        f"{NIXL}/base_scheduler.py",
        "if isinstance(g.kv_cache_spec, SlidingWindowSpec)",
    ),
    "MLAAttentionSpec": (
        "serves",
        "reads each block from one rank",
        f"{NIXL}/base_worker.py",
        "layer_spec, (MLAAttentionSpec, SlidingWindowMLASpec)",
    ),
    "SlidingWindowMLASpec": (
        "serves",
        "reads each block from one rank; where pages of several sizes share a group it moves all blocks",
        f"{NIXL}/base_worker.py",
        "layer_spec, (MLAAttentionSpec, SlidingWindowMLASpec)",
    ),
    "CircularBufferSpec": (
        "serves",
        "moves the ring whole",
        f"{NIXL}/base_worker.py",
        "isinstance(layer_spec, CircularBufferSpec)",
    ),
    "MambaSpec": (
        "serves some",
        "with convolution states stored channels first; not all types of states",
        f"{NIXL}/base_worker.py",
        "3-read Mamba conv transfer requires DS conv state layout.",
    ),
}
SPLIT = "distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py"
NO_SPLIT = ("refuses", "has no split for its states", SPLIT, "raise NotImplementedError(")
NIXL_STATES = {
    "MAMBA1": ("serves", "", SPLIT, "MAMBA1"),
    "MAMBA2": (
        "serves some",
        "wrong bytes for one group shared by several ranks, and for other numbers of speculative tokens",
        SPLIT,
        "MAMBA2",
    ),
    "GDN_ATTN": ("serves some", "wrong bytes for other numbers of speculative tokens", SPLIT, "GDN_ATTN"),
    "SHORT_CONV": NO_SPLIT,
    "LINEAR": NO_SPLIT,
    "CUSTOM": NO_SPLIT,
}
#: It compares the names of back ends and the cache data type, and moves bytes.
NIXL_BACKENDS = (
    "serves",
    "with the same back end on both sides",
    f"{NIXL}/metadata.py",
    '"attn_backend_name"',
)
#: Back ends that vLLM does not choose where there is a connector.
NIXL_NO_BACKEND = (
    "refuses",
    "vLLM does not choose it where there is a connector",
    "v1/attention/backend.py",
    "if use_kv_connector and not cls.supports_kv_connector():",
)
NIXL_QUANTISED = (
    "serves",
    "with the same cache data type on both sides; scales outside of the pages are not compared",
    f"{NIXL}/metadata.py",
    '"cache_dtype"',
)


class Unknown(Exception):
    """Something in vLLM that the tables do not name."""


def nixl(told: tuple[str, str, str, str] | None, what: str) -> dict:
    if told is None:
        raise Unknown(f"what NixlConnector does with {what}")
    verdict, why, file, text = told
    for number, line in enumerate((SOURCE / file).read_text().splitlines(), 1):
        if text in line:
            return {"nixl": verdict, "nixl_why": why, "nixl_source": f"{file}:{number}"}
    raise Unknown(f"{file} no longer says '{text}', which showed what NixlConnector does with {what}")
