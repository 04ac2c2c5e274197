"""Sleep gives a GPU's memory back: an engine that may sleep there is refused, and no other."""

from types import SimpleNamespace

import pytest
from kvferry.vllm import FerryConnector
from kvferry.vllm.refusal import Unsupported
from kvferry.vllm.worker.side import refuse_sleep
from vllm.platforms import current_platform


def config(sleeps):
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))


def test_memory_that_may_go_away_is_refused():
    with pytest.raises(Unsupported, match="memory on a cuda device back.*without --enable-sleep-mode"):
        refuse_sleep(config(True), "cuda")


@pytest.mark.parametrize(("sleeps", "device"), [(True, "cpu"), (False, "cuda"), (False, "cpu")])
def test_memory_that_stays_is_fine(sleeps, device):
    refuse_sleep(config(sleeps), device)


@pytest.mark.parametrize("stays", [True, False])
def test_where_vllm_asks_it_is_told_before_it_loads_the_weights(stays, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: stays)
    assert FerryConnector.supports_sleep_mode(None) is stays
