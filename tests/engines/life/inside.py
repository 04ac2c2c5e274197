"""What tests do in an engine's own process, with the engine: for `Server.call`."""

import time

from serving import sampled

#: What no cache holds.
BLANK = 7.0


def begin(engine, name, prompt, tokens=12, params=None, salt=None, **options):
    asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    engine.llm_engine.add_request(name, asked, sampled(tokens, params, **options))


def abort(engine, name):
    engine.llm_engine.abort_request([name])


def steps(engine, count):
    for _ in range(count):
        engine.llm_engine.step()
        time.sleep(0.001)


def pump(engine, seconds=60):
    """Steps until a request has finished: name to tokens, parameters and how it finished."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    deadline, done = time.monotonic() + seconds, {}
    while not done and scheduler.has_requests() and time.monotonic() < deadline:
        done = turn(engine)
        time.sleep(0.001)
    return done


def turn(engine):
    """One step, and what has finished with it."""
    done = [made for made in engine.llm_engine.step() if made.finished]
    return {
        made.request_id: (
            list(made.outputs[0].token_ids),
            made.kv_transfer_params,
            made.outputs[0].finish_reason,
        )
        for made in done
    }


def side(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.connector.scheduler


def whats_left(engine):
    scheduler = side(engine)
    status = scheduler.agent.status()
    return {
        "prefilling": list(scheduler.prefill.prefilling),
        "kept": list(scheduler.keep.kept),
        "wanted": list(scheduler.decode.wanted),
        "unwanted": list(scheduler.decode.unwanted),
        "growing": list(scheduler.prefill.growing),
        "answers": list(scheduler.turns.answers),
        "leases": status["leases"],
        "holds": status["holds"],
        "loads": counter(engine, "kvferry_loads_in_flight"),
        "quarantined": counter(engine, "kvferry_loads_quarantined"),
    }


def counter(engine, name):
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        # The ranks are processes of their own.
        return 0
    lines = get_kv_transfer_group().worker.agent.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def count_preemptions(engine):
    """From now on; they are in the scheduler's `preemptions`."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    given, scheduler.preemptions = scheduler._preempt_request, 0

    def preempt(*args, **options):
        scheduler.preemptions += 1
        given(*args, **options)

    scheduler._preempt_request = preempt


def preemptions(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.preemptions


def forget(engine):
    return engine.llm_engine.reset_prefix_cache()


def give_up(engine, params):
    side(engine).agent.abandon(params["kvferry"]["ticket"])


def leases(engine):
    return side(engine).agent.status()["leases"]


def restarts(engine):
    """How often it has started over each request that others may follow."""
    return [one["restarts"] for one in side(engine).agent.status()["growing"]]


def where(engine):
    """What a router tells D about P when it sends a request to both at once."""
    agent = side(engine).agent
    host, _, port = agent.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": agent.status()["engine"],
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": 1,
        "remote_request_id": "any",
    }


def waiting(engine):
    """Requests that wait for another engine, and the workers know nothing of."""
    return [name for name, wanted in side(engine).decode.wanted.items() if not wanted.loading]


def blank(engine):
    """The blocks that D has taken for a request that it reads hold nothing that anybody would compute."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for cache in get_kv_transfer_group().worker.kv_caches.values():
        cache[_loading(engine)] = BLANK


def filled(engine):
    """How many of them, from the first one on, have been read since, in every layer."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    caches = get_kv_transfer_group().worker.kv_caches.values()
    blocks = _loading(engine)
    full = (all((cache[block] != BLANK).all() for cache in caches) for block in blocks)
    return next((count for count, one in enumerate(full) if not one), len(blocks))


def _loading(engine):
    """The blocks of the one request that is read."""
    (wanted,) = (it for it in side(engine).decode.wanted.values() if it.loading)
    (blocks,) = wanted.blocks
    return blocks


def take_at_once(engine, at_once):
    """Whether D takes blocks as soon as P has heard of a request."""
    pace = side(engine).decode.pace
    if at_once:
        pace.is_time = lambda frontier, age, tokens, free: True
    elif "is_time" in vars(pace):
        del pace.is_time
