"""Real SGLang engines of tiny models, in processes that are forked from one that has imported SGLang once: an engine then
starts in a second or two."""

import asyncio
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engines"))

import safetensors.torch
from tiny import save_model

#: For SGLang, before it is imported.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Several ranks share what cores there are.
    "SGLANG_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}|0-{os.cpu_count() - 1}",
    # In place of bfloat16, whatever the model's numbers are.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "TORCHDYNAMO_DISABLE": "1",
    # Of the package as such, vLLM is in this environment, too.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OPTIONS = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "log_level": "info",
    "random_seed": 7,
    # Or it looks for work all the time, on cores that others need.
    "sleep_on_idle": True,
}
#: With overlapping steps SGLang keeps copies of states, which it has kernels for GPUs for.
_IN_TURNS = {"disable_overlap_schedule": True}
#: What a model needs on a CPU.
KINDS = {
    "nemotron_h": _IN_TURNS,
    "falcon_h1": _IN_TURNS,
    "kimi_linear": _IN_TURNS,
    # Its stand-ins hold their numbers in the format of the model's own, for which there is no other choice in vLLM either.
    "qwen3_5": _IN_TURNS | {"dtype": "bfloat16"},
}
#: Of each role.
ROLES = {
    "alone": {},
    "prefill": {
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "kvferry",
        # With overlapping steps SGLang records a CUDA event before it hands on a prefix that it has in its cache.
        "disable_overlap_schedule": True,
    },
    "decode": {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "kvferry",
        # The default copies to pinned memory, for which it takes a GPU.
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    },
}
#: As in Linux's `sys/prctl.h`.
PR_SET_PDEATHSIG = 1
#: Engines are forked, and what `random` draws next is forked with them.
_DRAW = random.SystemRandom()
#: Seconds that an engine may take to start, and an answer to come.
START, ANSWER = 120, 60


def model(kind, folder):
    """A tiny model, with a configuration in the words that SGLang knows."""
    path = Path(folder) / kind
    if path.exists():
        return path
    save_model(kind.removesuffix("_tied"), path)
    config = path / "config.json"
    given = json.loads(config.read_text())
    if kind.endswith("_tied"):
        given["tie_word_embeddings"] = True
        _tie(path / "model.safetensors")
    if kind == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        given["hybrid_override_pattern"] = "".join(letters[it] for it in given.pop("layers_block_type"))
        # One for the cache, and one for the layers.
        given["mamba_n_groups"] = given["n_groups"]
    if kind == "qwen3_5":
        given["full_attention_interval"] = 2
    if kind == "deepseek":
        given["moe_layer_freq"] = 1
        # On a CPU SGLang knows DeepSeek's positions with YaRN alone.
        given["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }
    config.write_text(json.dumps(given))
    return path


def _tie(path):
    """Its output weights are those of its tokens, small enough not to outweigh what the layers make of the past."""
    weights = safetensors.torch.load_file(path)
    del weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] *= 0.1
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def free_port():
    """Below those that the kernel hands out by itself: whoever starts later finds it still free."""
    while True:
        with socket.socket() as tried, contextlib.suppress(OSError):
            port = _DRAW.choice(range(20000, 32000))
            tried.bind(("127.0.0.1", port))
            return port


class Engine:
    """An engine that answers several requests at once."""

    def __init__(self, path, role, log, options=None, settings=None, prepare=(), environment=None):
        """`settings` are options of kvferry's, and `prepare` is called in the engine's process before it starts."""
        self.role, self.log = role, Path(log)
        self.port = free_port() if role == "prefill" else None
        given = OPTIONS | KINDS.get(Path(path).name, {}) | ROLES[role] | {"model_path": str(path), "port": free_port()} | (options or {})
        if self.port:
            given["disaggregation_bootstrap_port"] = self.port
        told = {"KVFERRY_OPTIONS": json.dumps({"audit": "all"} | (settings or {}))} | (environment or {})
        ours, theirs = multiprocessing.Pipe()
        self.process = become(functools.partial(_answer, theirs), given, told, log, prepare)
        theirs.close()
        self._pipe, self._answers, self._numbers = ours, {}, count()
        self._changed = threading.Condition()
        self._thread = None

    def ready(self):
        """Waits until it has started; or says why it has not."""
        if self._thread is not None:
            return self
        if not self._pipe.poll(START):
            raise TimeoutError(self.log.read_text()[-3000:])
        try:
            assert self._pipe.recv() == "ready"
        except EOFError:
            raise RuntimeError(self.log.read_text()[-3000:]) from None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def _listen(self):
        try:
            while True:
                number, answer = self._pipe.recv()
                with self._changed:
                    self._answers[number] = answer
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._answers[None] = {"error": "the engine has ended"}
                self._changed.notify_all()

    def ask(self, ids, tokens=12, room=None, source=None, **sampling):
        """Starts a request: its number. `source` is the P that it is to be read from, or this engine itself."""
        number = next(self._numbers)
        given = {"input_ids": ids, "rid": f"{self.role}-{number}"}
        given["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        if room is not None:
            port = (source or self).port
            given |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        self._pipe.send((number, given))
        return number

    def abort(self, number):
        self._pipe.send((None, f"{self.role}-{number}"))

    def answer(self, number, timeout=ANSWER):
        end = time.monotonic() + timeout
        with self._changed:
            while number not in self._answers and None not in self._answers:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"{self.role} does not answer: {self.log.read_text()[-2000:]}")
            return self._answers.pop(number, None) or self._answers[None]

    def generate(self, ids, tokens=12, **more):
        return self.answer(self.ask(ids, tokens, **more))["ids"]

    def said(self, words):
        return words in self.log.read_text()

    def wait_for(self, words, timeout=20):
        end = time.monotonic() + timeout
        while not self.said(words):
            assert time.monotonic() < end, f"'{words}' is not in the log: {self.log.read_text()[-2000:]}"
            time.sleep(0.05)

    def kill(self):
        """At once, and all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self):
        if self.process.is_alive():
            try:
                self.kill()
            except ProcessLookupError:
                pass
        self._pipe.close()


def become(what, options, environment, log, prepare=()):
    """A process that does `what` with an engine's options, and leads a session of its own."""
    process = multiprocessing.get_context("fork").Process(target=_become, args=(what, options, environment, prepare, str(log)))
    process.start()
    return process


def _become(what, options, environment, prepare, log):
    os.setsid()
    # Tests that are killed leave no engine behind: SGLang's own processes end with the one that started them.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    os.environ.update(environment)
    for change in prepare:
        change()
    from sglang.srt.entrypoints import engine as theirs

    # What it starts is forked, too.
    multiprocessing.set_start_method("fork", force=True)
    theirs.mp.set_start_method = lambda *_, **__: None
    what(options)


def serve(options):
    """As `python -m sglang.launch_server` does."""
    from prometheus_client import values
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    # Chosen when it is imported, which was before there were processes to count in.
    values.ValueClass = values.MultiProcessValue()
    launch_server(ServerArgs(**options))


def _answer(pipe, options):
    import sglang

    engine = sglang.Engine(**options)
    pipe.send("ready")

    async def serve():
        loop, running = asyncio.get_running_loop(), set()
        while True:
            try:
                number, given = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                return
            if number is None:
                engine.tokenizer_manager.abort_request(rid=given)
                continue
            task = loop.create_task(one(number, given))
            running.add(task)
            task.add_done_callback(running.discard)

    async def one(number, given):
        try:
            made = await engine.async_generate(**given)
            why = made["meta_info"]["finish_reason"]
            answer = {"ids": made["output_ids"], "why": why, "cached": made["meta_info"].get("cached_tokens")}
            if why and why.get("type") == "abort":
                answer["error"] = why.get("message", "")
        except Exception as error:
            answer = {"ids": None, "error": str(error)}
        pipe.send((number, answer))

    engine.loop.run_until_complete(serve())
