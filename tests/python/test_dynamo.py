"""Dynamo accepts the alias, and asks in the way that FerryConnector answers.

By its names and rules, written down here, and by its own code: tools/python-env.sh installs `ai-dynamo`.
"""

from types import SimpleNamespace

import stand_in  # noqa: F401  (first: it sets the environment up)

# isort: split
import pytest
from kvferry.vllm import FerryConnector, dynamo
from kvferry.vllm.plugin import MODULE
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

ALIAS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.vllm.dynamo"}
#: What Dynamo 1.6.1 knows: by name, whether a prefill's answer carries parameters for the decode side as
#: they are (pulled), makes its own (pushed), or carries none (a shared cache).
NAMES = {
    "NixlConnector": "pulled",
    "NeuronNixlConnector": "pulled",
    "MooncakeConnector": "pushed",
    "LMCacheMPConnector": "shared",
}
WRAPPERS = ("MultiConnector", "PdConnector")
#: What it sends to the prefill side of a connector that pulls.
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def by_the_rules(config):
    """How Dynamo hands over with a configuration, as its resolver decides it."""
    name = config.kv_transfer_config.kv_connector
    if name in WRAPPERS:
        children = config.kv_transfer_config.kv_connector_extra_config["connectors"]
        known = [child["kv_connector"] for child in children if child["kv_connector"] in NAMES]
        known = [one for one in known if NAMES[one] != "shared"] or known
        if len(known) != 1:
            raise ValueError(f"{name} has {len(known)} PD-capable sub-connectors")
        (name,) = known
    if name not in NAMES:
        raise ValueError(f"Unsupported kv_connector={name!r} for PD")
    return NAMES[name], ASKED if NAMES[name] == "pulled" else None


def by_dynamo(config):
    from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol

    made = make_kv_connector_protocol(config)
    answer = SimpleNamespace(kv_transfer_params={"remote_engine_id": "p", "kvferry": {"tokens": 3}})
    as_it_is = made.decode_request_kv_transfer_params(answer) == answer.kv_transfer_params
    return "pulled" if as_it_is else "otherwise", made.prefill_request_kv_transfer_params()


RESOLVERS = [by_the_rules, by_dynamo]


def configured(*children, wrapper=None):
    if wrapper is None:
        (child,) = children
        return SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_role="kv_both", **child))
    extra = {"connectors": [{"kv_role": "kv_both", **child} for child in children]}
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector=wrapper, kv_role="kv_both", kv_connector_extra_config=extra
        )
    )


@pytest.mark.parametrize("resolve", RESOLVERS)
def test_dynamo_pulls_with_the_alias(resolve):
    assert resolve(configured(ALIAS)) == ("pulled", ASKED)
    other = {"kv_connector": "OffloadingConnector"}
    for wrapper in WRAPPERS:
        assert resolve(configured(other, ALIAS, wrapper=wrapper)) == ("pulled", ASKED)


@pytest.mark.parametrize("resolve", RESOLVERS)
def test_and_not_without_it(resolve):
    with pytest.raises(ValueError, match="Unsupported kv_connector='FerryConnector'"):
        resolve(configured({"kv_connector": "FerryConnector"}))
    with pytest.raises(ValueError, match="PD-capable sub-connector"):
        resolve(configured({"kv_connector": "FerryConnector"}, wrapper="MultiConnector"))


def test_the_rules_are_those_of_the_installed_dynamo():
    from dynamo.vllm import kv_connector_protocols as theirs

    assert set(theirs.KV_CONNECTOR_PROTOCOLS) == set(NAMES)
    assert theirs.MULTI_CONNECTOR_WRAPPERS == WRAPPERS
    shared = {
        name
        for name, made in theirs.KV_CONNECTOR_PROTOCOLS.items()
        if not made.produces_kv_transfer_params
    }
    assert shared == {name for name, how in NAMES.items() if how == "shared"}


def test_vllm_loads_our_class_by_the_alias():
    config = configured(ALIAS).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(config) is FerryConnector is dynamo.NixlConnector
    # Inside a MultiConnector, vLLM looks for statistics by the class's own name.
    assert FerryConnector.__name__ == "FerryConnector"
    # Without the path it is vLLM's own.
    path = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    ).__module__
    assert path.startswith("vllm.") and MODULE.startswith("kvferry.")
