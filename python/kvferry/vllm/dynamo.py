"""FerryConnector under the one name that NVIDIA Dynamo hands over by pulling for.

`{"kv_connector":"NixlConnector","kv_connector_module_path":"kvferry.vllm.dynamo","kv_role":"kv_both"}`

Dynamo decides by the connector's name how a request is handed over, and knows few names; how it does it for
`NixlConnector` is what FerryConnector needs. vLLM prefers a module path to the connectors that it knows by
name, so it loads this one. The class keeps its own name: inside a MultiConnector vLLM finds statistics by it.

vLLM treats the name as its own connector's in a few places: docs/vllm.md lists them.
"""

from .connector import FerryConnector

NixlConnector = FerryConnector

__all__ = ["NixlConnector"]
