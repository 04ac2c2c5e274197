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
    from kvferry.vllm.worker import WorkerSide

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

        def endings(self, timeout):
            return []

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
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
    assert step() == ["mark", "mark"]
    assert step(loads=[{"request": "r", "ticket": {}}]) == ["wait for the mark", "load", "mark", "mark"]
    assert step(hands_over=True) == ["mark", "mark"]
    # Where a draft model runs after the token that ends a prompt, that is waited for, too.
    config.speculative_config = object()
    assert step(hands_over=True) == ["wait for the stream", "mark", "mark"]
    assert step() == ["mark", "mark"]


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
