"""On a GPU, whose work goes on when the host has heard of its end: what is written before what is read."""

import random
import threading
from types import SimpleNamespace

from environment import REMOTE_DECODE
from exact import prompts
from serving import sampled

from .inside import give_up, side


def test_what_is_written_is_written_before_it_moves(monkeypatch):
    import torch
    from kvferry.vllm.messages import Orders
    from kvferry.vllm.worker.side import WorkerSide

    happened = []

    class Stream:
        def synchronize(self):
            happened.append("wait for the stream")

        def record_event(self):
            happened.append("mark")
            return SimpleNamespace(query=lambda: False, synchronize=lambda: happened.append("wait for the mark"))

    began = threading.Event()

    class Agent:
        def load(self, **load):
            happened.append("load")
            began.set()

        done = []

        def endings(self, timeout):
            done, self.done = self.done, []
            return done

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr("kvferry.vllm.metrics.ended", lambda ending: {})
    parallel = SimpleNamespace(data_parallel_size=1)
    config = SimpleNamespace(speculative_config=None, parallel_config=parallel)
    worker = WorkerSide(config, None, None)
    worker.storages = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    worker.agent = Agent()

    def step(**orders):
        orders = Orders(**orders)
        worker.obey(orders)
        # Whoever waits for the stream is not the engine's own thread.
        assert not orders.loads or began.wait(60)
        worker.written(orders)
        worker.results()
        done = happened[:]
        happened.clear()
        return done

    # What was written before a load begins is waited for, and nothing else.
    assert step() == ["mark"]
    assert step(loads=[{"request": "r", "ticket": {}}]) == ["wait for the mark", "load", "mark"]
    assert step(hands_over=True) == ["mark"]
    # A step that has nothing written touches nothing. What is landed, or copied for another answer, is written.
    assert step(writes=False) == []
    worker.agent.done = [SimpleNamespace(request="r", outcome="done", seconds={"wire": 0.0}, rest=torch.empty(0, 2))]
    assert step(writes=False) == ["mark"] and step(writes=False) == []
    worker.shares.order = lambda share, loading: True
    assert step(writes=False, shares=[SimpleNamespace(reader="r", request="s")]) == ["mark"]
    # Where a draft model runs after the token that ends a prompt, that is waited for, too.
    config.speculative_config = object()
    assert step(hands_over=True) == ["wait for the stream", "mark"]
    assert step() == ["mark"]


def test_steps_that_only_wait_write_nothing(pair):
    prefill, decode = pair("qwen3")
    (prompt,) = prompts(random.Random(15), [70])
    (params,) = prefill.prefill([prompt])
    told = decode.call(steps_that_write, prompt, params)
    assert (True, False) in told and (False, True) in told and len(set(told)) == 2


def steps_that_write(engine, prompt, params):
    """Of each step, whether it computes nothing, and whether it writes."""
    connector, told = engine.llm_engine.engine_core.engine_core.scheduler.connector, []
    given = connector.build_connector_meta

    def build(output):
        made = given(output)
        told.append((made.idle, made.writes))
        return made

    connector.build_connector_meta = build
    engine.generate({"prompt_token_ids": prompt}, sampled(1, params), use_tqdm=False)
    connector.build_connector_meta = given
    return told


def test_only_steps_of_prompts_that_are_handed_over_are_waited_for(pair):
    prefill, _ = pair("qwen3")
    (prompt,) = prompts(random.Random(14), [70])
    handed = prefill.call(steps_that_hand_over, prompt, dict(REMOTE_DECODE))
    assert handed == [True, False] and not any(prefill.call(steps_that_hand_over, prompt, None))


def steps_that_hand_over(engine, prompt, params):
    scheduler, handed = side(engine), []
    given = scheduler.orders

    def orders(scheduled):
        made = given(scheduled)
        handed.append(made.hands_over)
        return made

    scheduler.orders = orders
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampled(1, params), use_tqdm=False)
    engine.llm_engine.step()
    scheduler.orders = given
    if made.kv_transfer_params:
        give_up(engine, made.kv_transfer_params)
    return handed
