"""vLLM knows the connector by its name, in every process, and so does its MultiConnector."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from handmade import grant, load
from kvferry.vllm import FerryConnector, plugin
from kvferry.vllm.metrics import Stats, ended
from kvferry.vllm.options import Options
from kvferry.vllm.refusal import Unsupported
from vllm.config import CompilationConfig, CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins


@pytest.fixture(autouse=True)
def plugins():
    """As each of vLLM's processes does it, when it starts."""
    load_general_plugins()


def test_the_name_is_enough_and_the_module_path_keeps_working():
    for path in (None, "kvferry.vllm"):
        config = KVTransferConfig(
            kv_connector="FerryConnector", kv_connector_module_path=path, kv_role="kv_producer"
        )
        assert KVConnectorFactory.get_connector_class(config) is FerryConnector
        assert KVConnectorFactory.supports_hma_config(config)


def test_registering_again_changes_nothing():
    for _ in range(2):
        plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("FerryConnector") is FerryConnector


def test_a_multi_connector_finds_the_statistics(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3, 4]])
    (ending,) = load(decode, "a", grant(prefill, "a", **facts), **facts)
    stats = Stats.of_loads([ended(ending)])
    # As the server's process gets them.
    data = json.loads(json.dumps({"FerryConnector": stats.to_dict()}))
    made = MultiConnector.build_kv_connector_stats(data)
    assert made.data["FerryConnector"] == stats
    assert made.reduce()["FerryConnector"]["Loads"] == 1


def test_the_plug_in_loads_nothing_else_of_this_package():
    """Every process of vLLM loads it, most of them for nothing."""
    look = "import sys, kvferry.vllm.plugin; print('torch' in sys.modules, 'vllm' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, timeout=60, text=True)
    assert answer.stdout.split() == ["False", "False"], answer


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrong_option_is_named_while_vllm_reads_its_arguments(monkeypatch, inside):
    """Before it loads any weights, on a platform that captures full graphs."""
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    given = dict(kv_connector="FerryConnector", kv_role="kv_both", kv_connector_extra_config={"transprot": "tcp"})
    if inside:
        given = dict(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [given]})
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
    with pytest.raises(ValueError, match="no option 'transprot': did you mean 'transport'"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**given), compilation_config=graphs)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_an_engine_that_returns_routed_experts_is_refused(role):
    """vLLM refuses it for its own connectors that hand over, by their names."""
    given = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_both")
    config = SimpleNamespace(
        kv_transfer_config=given, aux_output_config=SimpleNamespace(enable_return_routed_experts=True)
    )
    with pytest.raises(Unsupported, match="^--enable-return-routed-experts: .* Start the engine without it"):
        FerryConnector(config, role, SimpleNamespace())


def test_each_machine_of_an_engine_may_find_its_own_address(monkeypatch, tmp_path):
    monkeypatch.delenv("KVFERRY_KEY", raising=False)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.7")
    assert Options.read({"host": "auto"}).address(5)["bind"] == "127.0.0.7:5"
    # With a key, nothing need be said.
    key = tmp_path / "key"
    key.write_text("a key of a test")
    assert Options.read({"key_file": str(key)}).address(5)["bind"] == "127.0.0.7:5"
    assert Options.read({}).address(5)["bind"] == "127.0.0.1:5"
    monkeypatch.setenv("KVFERRY_KEY", "a key of a test")
    assert Options.read({}).address(5)["bind"] == "127.0.0.7:5"
    assert Options.read({"insecure": True}).address(5)["bind"] == "127.0.0.1:5"
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    with pytest.raises(ValueError, match="'host' .* is 'auto', but must be an address: .* VLLM_HOST_IP"):
        Options.read({"host": "auto"}).address(5)
