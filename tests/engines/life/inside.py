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


def count_computed(engine):
    """Counts the tokens that are computed from now on."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    if hasattr(scheduler, "computed"):
        return
    given, scheduler.computed = scheduler.schedule, 0

    def schedule(*args, **options):
        made = given(*args, **options)
        scheduler.computed += made.total_num_scheduled_tokens
        return made

    scheduler.schedule = schedule


def computed(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.computed


def forget(engine):
    return engine.llm_engine.reset_prefix_cache()


def give_up(engine, params):
    agent, ticket = side(engine).agent, params["kvferry"]["ticket"]
    agent.hold(ticket, patience=60)
    agent.abandon(ticket)


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
    """The blocks that D has taken for the requests that it reads hold nothing that anybody would compute, as far as they
    are read before the end."""
    for tables in _loading(engine).values():
        for cache, blocks in tables:
            cache[blocks] = BLANK


def filled(engine):
    """How many of the one request's, from the first one on, have been read since, in every layer."""
    (count,) = filled_of_each(engine).values()
    return count


def filled_of_each(engine):
    """The same of all requests that are read."""
    return {name: _filled(tables) for name, tables in _loading(engine).items()}


def _filled(tables):
    count = min(len(blocks) for _, blocks in tables)
    full = (all((cache[blocks[at]] != BLANK).all() for cache, blocks in tables) for at in range(count))
    return next((at for at, one in enumerate(full) if not one), count)


def _loading(engine):
    """By request that is read, the caches that grow, not states or windows, and its blocks in each."""
    from kvferry.vllm.params import stem
    from kvferry.vllm.describe.specs import keeps_window
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    groups, caches = side(engine).decode.groups, get_kv_transfer_group().worker.kv_caches
    grows = [
        (at, layer)
        for at, index in enumerate(groups.cache.transfer_group_ids)
        if not groups.recurrent[at] and not keeps_window(groups.specs[at])
        for layer in groups.cache.kv_cache_groups[index].layer_names
    ]
    wanted = {stem(name): it.blocks for name, it in side(engine).decode.wanted.items() if it.loading}
    return {name: [(caches[layer], tables[at]) for at, layer in grows] for name, tables in wanted.items()}


def take_at_once(engine, at_once):
    """Whether D takes blocks as soon as P has heard of a request."""
    pace = side(engine).decode.pace
    if at_once:
        pace.is_time = lambda frontier, age, tokens, free: True
    elif "is_time" in vars(pace):
        del pace.is_time
