"""An engine that is measured."""

import contextlib
import multiprocessing
import os
import time
import traceback

import rivals
from http_pair import free_ports
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

from .contenders import AGAIN, DEVICE, is_rival
from .models import hybrid

#: Seconds to wait for an engine.
PATIENCE = 300
#: Tokens of a block.
BLOCK = 32


class Engine:
    """An engine in a process of its own, forked from this one."""

    def __init__(self, contender, role, model, arguments):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, contender, role, model, arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self):
        """What a router tells D about this engine, if it is one of ours."""
        return self.answer()

    def ask(self, name, prompt, params):
        self.pipe.send((name, prompt, params))

    def rest(self):
        """Waits until it has nothing left to do."""
        self.pipe.send(())
        self.answer()

    def answer(self):
        """For a request: its name, when it had its token, which, and what goes to the router."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE} s")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe, contender, role, model, arguments):
    try:
        _loop(pipe, _engine(contender, role, model, arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


def _engine(contender, role, model, arguments):
    how = None
    if is_rival(contender):
        environment, extra = rivals.settings(contender, DEVICE)
        os.environ.update(environment)
        # Two engines on one host need two, also when they are forked one after the other.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])
        how = dict(kv_connector=rivals.INSTALLED, kv_buffer_device=DEVICE, kv_connector_extra_config=extra)
    elif contender != AGAIN:
        transport, _, push = contender.partition("+")
        how = dict(
            kv_connector="FerryConnector",
            kv_connector_extra_config={"transport": transport, "push": "always" if push else "never"},
        )
    longest, count, states = max(arguments.lengths), arguments.concurrent, hybrid(arguments.model)
    each = longest // BLOCK + 2
    if current_platform.is_cuda():
        # Many engines share a card, and none may measure what is free while others start.
        device = dict(dtype="bfloat16", gpu_memory_utilization=0.05, kv_cache_memory_bytes=8 << 30)
    else:
        device = dict(dtype="float32")
    return LLM(
        model=str(model),
        **device,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + 64,
        max_num_seqs=max(4, count),
        disable_log_stats=True,
        enable_prefix_caching=contender == AGAIN,
        num_gpu_blocks_override=max(48, 8 * count) if states else (count + 1) * each + 16,
        **({} if states else {"block_size": BLOCK}),
        **({"max_num_batched_tokens": arguments.chunk} if arguments.chunk else {}),
        **({"kv_transfer_config": KVTransferConfig(kv_role=role, **how)} if how else {}),
    )


def _where(core):
    """What a router tells D about P when it sends a request to both at once."""
    scheduler = getattr(core.scheduler.connector, "_scheduler", None)
    if scheduler is None:
        return None
    host, _, port = scheduler.agent.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "remote_engine_id": scheduler.agent.status()["engine"],
        "remote_host": host,
        "remote_port": int(port),
        "remote_request_id": "any",
    }


def _loop(pipe, engine):
    core = engine.llm_engine.engine_core.engine_core
    pipe.send(_where(core))
    resting = False
    while True:
        if resting and not core.scheduler.has_requests():
            pipe.send(())
            resting = False
        while not core.scheduler.has_requests() or pipe.poll():
            question = pipe.recv()
            if question is None:
                return
            if not question:
                resting = True
                break
            name, prompt, params = question
            sampling = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        if not core.scheduler.has_requests():
            continue
        outputs, executed = core.step_fn()
        for output in (one for all_ in (outputs or {}).values() for one in all_.outputs):
            if not output.new_token_ids:
                raise RuntimeError(f"the request ended without a token: {output.finish_reason}")
            # The clock of the machine: the same for all.
            name = output.request_id.rpartition("-")[0]
            (token,) = output.new_token_ids
            pipe.send((name, time.monotonic(), token, output.kv_transfer_params))
            engine.llm_engine.output_processor.abort_requests([output.request_id], internal=True)
        core.post_step(executed)
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)
