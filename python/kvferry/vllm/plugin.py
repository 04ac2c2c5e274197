"""Makes the connector known to vLLM by its name alone.

vLLM calls `register` in each of its processes (entry point `kvferry` of the group
`vllm.general_plugins`), before anything else is loaded: it must cost nothing.
"""

from __future__ import annotations

#: How the entry point is called in `pyproject.toml`, and so in `VLLM_PLUGINS`.
GROUP, PLUGIN = "vllm.general_plugins", "kvferry"
NAME = "FerryConnector"
MODULE = "kvferry.vllm.connector"


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may ask more than once in a process, and refuses a name that it has already.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
