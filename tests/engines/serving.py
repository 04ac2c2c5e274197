"""Two vLLM engines in processes of their own, forked from one that has imported vLLM once."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import time
import traceback

import environment

environment.forked(os.environ)

import patches  # noqa: E402
from forked import CALM  # noqa: E402
from http_pair import free_ports  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

# What every engine would otherwise import for itself; not in every version of vLLM. Its worker for CPUs keeps
# buffers in host memory from then on, also where a GPU's worker makes them.
for module in (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    *(["vllm.v1.worker.cpu_worker"] if current_platform.is_cpu() else []),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
# And would do for itself: it looks through all modules for kernels that have another form on a CPU. That is half of a
# start.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
exec(CALM, {})

#: Seconds to wait for an answer; starting a TP 2 engine on a busy machine takes the longest.
PATIENCE = 240
#: Where a test does not wait for their end, nothing ends by itself, however busy the machine.
PATIENT = {"lease_seconds": 600.0, "handshake_timeout_seconds": 60.0}


class Server:
    """An engine in a process of its own that answers one question after the other; without a role, it has
    no connector. Who does not wait for it asks whether it is ready."""

    def __init__(self, model, role, wait=True, **options):
        # An engine that starts collects garbage several times: not in what was there before it.
        gc.freeze()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, role, options))
        self._process.start()
        theirs.close()
        if wait:
            self.ask("ready")

    def ask(self, *question):
        self._pipe.send(question)
        if not self._pipe.poll(PATIENCE):
            self._process.kill()
            raise AssertionError(f"no answer to {question[0]} within {PATIENCE} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise AssertionError(answer)
        return answer

    def generate(self, prompt, tokens=12, params=None):
        """Tokens, and what the engine hands to the router."""
        (answer,) = self.generate_all([prompt], tokens, [params])
        return answer

    def generate_all(self, prompts, tokens=12, params=None, **sampling):
        """The same for many requests at once."""
        params = params or [None] * len(prompts)
        return self.ask("generate", prompts, tokens, params, sampling)[0]

    def prefill(self, prompts, **sampling):
        """What the engine hands to the router for each prompt."""
        params = [dict(environment.REMOTE_DECODE) for _ in prompts]
        return [params for _, params in self.generate_all(prompts, 1, params, **sampling)]

    def call(self, function, *args):
        """Runs a function in the engine's process, with the engine."""
        return self.ask("call", function, args)[0]

    def used_blocks(self):
        return self.call(used_blocks)

    def idle(self):
        """Lets an engine without requests work on as a server does. Blocks still in use then."""
        return self.call(idle)

    @contextlib.contextmanager
    def stopped(self):
        """Not one instruction of it runs meanwhile."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self.alive():
                os.kill(self._process.pid, signal.SIGCONT)

    def alive(self):
        return self._process.is_alive()

    def kill(self):
        self._process.kill()
        self._process.join()

    def close(self):
        with contextlib.suppress(BrokenPipeError, EOFError):
            self._pipe.send(("stop",))
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def idle(engine, seconds=60):
    core = engine.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + seconds
    while (core.scheduler.has_requests() or core.batch_queue) and time.monotonic() < deadline:
        core.step_fn()
        time.sleep(0.001)
    return used_blocks(engine)


def used_blocks(engine):
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def sampled(tokens, params=None, **options):
    usual = dict(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    return SamplingParams(**usual | options)


def _serve(pipe, model, role, options):
    try:
        patches.install()
        for change in options.pop("prepare", ()):
            change()
        extra, stock = options.pop("extra", {}), options.pop("stock", False)
        connector = dict(
            kv_connector="FerryConnector",
            kv_role=role,
            kv_connector_extra_config=extra if stock else PATIENT | extra,
        )
        if stock:
            connector |= dict(kv_connector="NixlConnector", kv_buffer_device=current_platform.device_type)
            # Two engines on one host need two, also when they are forked one after the other.
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])
        # Others before ours, and others after it.
        if (others := options.pop("multi", None)) is not None:
            before, after = others
            connector = dict(
                kv_connector="MultiConnector",
                kv_role=role,
                kv_connector_extra_config={"connectors": [*before, connector, *after]},
            )
        policy = options.pop("failure", "fail")
        usual = dict(
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            disable_log_stats=True,
            enable_prefix_caching=options.pop("prefix", False),
            num_gpu_blocks_override=options.pop("blocks", 64),
        )
        if role is not None:
            usual["kv_transfer_config"] = KVTransferConfig(
                **connector, kv_load_failure_policy=policy
            )
        engine = LLM(model=str(model), **usual | options)
    except BaseException:
        pipe.recv()
        pipe.send(traceback.format_exc())
        return
    while True:
        question = pipe.recv()
        try:
            if question[0] == "stop":
                break
            if question[0] == "generate":
                _, prompts, tokens, params, sampling = question
                made = engine.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    [sampled(tokens, one, **sampling) for one in params],
                    use_tqdm=False,
                )
                made = [(list(m.outputs[0].token_ids), m.kv_transfer_params) for m in made]
                pipe.send((made,))
            elif question[0] == "call":
                pipe.send((question[1](engine, *question[2]),))
            else:
                pipe.send(())
        except BaseException:
            pipe.send(traceback.format_exc())
    os._exit(0)
