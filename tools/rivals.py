"""vLLM's own NixlConnector, as all that is measured here meets it: as it is installed, and as its author would tune it.

Who is quoted beside it quotes all of them.
"""

INSTALLED = "NixlConnector"
TUNED = "NixlConnector+tuned"
#: Tuned, and a layout in which a block is one piece in all layers, so that there are fewer and longer copies.
OUTERMOST = "NixlConnector+tuned+BLHNC"
NAMES = (INSTALLED, TUNED, OUTERMOST)

#: By the kind of memory that is moved: what its environment has. UCX otherwise reads a card's memory in software where
#: it sees no
#: NVLink (NIXL sets this itself since its pull request 2208, which 1.5.1 does not have), and sends in pieces of 8 KiB.
UCX = {
    "cuda": {
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_TCP_TX_SEG_SIZE": "4m",
        "UCX_TCP_RX_SEG_SIZE": "4m",
    },
    "cpu": {"UCX_TCP_TX_SEG_SIZE": "4m", "UCX_TCP_RX_SEG_SIZE": "4m"},
}
#: Likewise: `kv_connector_extra_config`. Four threads, which it takes by itself, are more than two cores have.
EXTRA = {"cuda": {}, "cpu": {"num_threads": 1}}


def settings(name, device):
    """What is set for it: the environment, and `kv_connector_extra_config`."""
    if name == INSTALLED:
        return {}, {}
    outermost = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"} if name == OUTERMOST else {}
    return UCX[device] | outermost, EXTRA[device]


def words(name, device):
    """The same for a reader."""
    environment, extra = settings(name, device)
    said = [f"{key}={value}" for key, value in environment.items()]
    said += [f"{key} {value}" for key, value in extra.items()]
    return ", ".join([f'kv_buffer_device "{device}"', *said])
