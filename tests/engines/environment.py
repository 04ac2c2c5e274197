"""How real engines run in tests and benchmarks: small, on a CPU, and without a network."""

#: What a user's server gets, too.
SERVER = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Longer than any test: a request that a router sends on an idle connection in the moment in which the server
    # closes it is answered by nobody.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}
#: An engine that is forked from a process that has imported vLLM, and that answers in its own process.
FORKED = SERVER | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # What vLLM compiles on first use whatever `enforce_eager` says, such as how it counts log-probabilities, costs a
    # run of the C++ compiler in every engine, and runs as it is written without.
    "TORCHDYNAMO_DISABLE": "1",
}
#: How a router asks for a prompt's blocks to be kept.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def forked(environ):
    """Sets up a process that engines are forked from; before it imports vLLM."""
    environ.update(FORKED)
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
