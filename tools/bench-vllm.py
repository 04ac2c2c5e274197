"""How soon a decode engine speaks, with kvferry and with vLLM's own NixlConnector, in the same run.

    tools/bench-vllm.sh [--model qwen3|nemotron-h] [--rounds N] [--starts N] [--lengths N,N,…] [--json]

A pair of real vLLM engines (TP 1, CPU) per contender, all alive at once. In every round each pair gets
one request of each length, in random order: P computes the prompt, and the clock runs from the moment D
takes the request until its first token. Ratios are of medians over the same rounds; below 1 kvferry is
faster. The first request of a pair, which includes the handshake, is counted apart.

Each engine steps as vLLM's own loop does: it blocks when idle, and sleeps a millisecond after a step
that ran nothing while a request waits.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engines"))

import environment  # noqa: E402

environment.forked(os.environ)
# Of the rival alone.
os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
# The rival serves states in this order only.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

import transformers  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

RIVAL = "NixlConnector"
CONTENDERS = ("nixl", "tcp", "local", RIVAL)
#: Seconds to wait for an engine.
PATIENCE = 300
#: Tokens of a block.
BLOCK = 32

# Enough memory a token for its transfer to show: 64 KiB of keys and values.
COMMON = dict(
    vocab_size=512, hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=128
)
MODELS = {
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, num_hidden_layers=8, intermediate_size=256, architectures=["Qwen3ForCausalLM"]
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **COMMON,
        num_hidden_layers=12,
        intermediate_size=256,
        layers_block_type=["mamba", "attention", "mlp"] * 4,
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=128,
        conv_kernel=4,
        architectures=["NemotronHForCausalLM"],
    ),
}


class Engine:
    """An engine in a process of its own, forked from this one."""

    def __init__(self, contender, role, model, longest):
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, contender, role, model, longest), daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self):
        self._answer()

    def ask(self, prompt, params):
        """Seconds to the first token, and what goes to the router."""
        self._pipe.send((prompt, params))
        return self._answer()

    def rest(self):
        """Waits until it has nothing left to do."""
        self._pipe.send(())
        self._answer()

    def _answer(self):
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe, contender, role, model, longest):
    try:
        _loop(pipe, _engine(contender, role, model, longest))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


def _engine(contender, role, model, longest):
    if contender == RIVAL:
        port = 5600 if role == "kv_producer" else 5700
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port + os.getpid() % 90)
        how = dict(kv_connector=RIVAL, kv_buffer_device="cpu")
    else:
        how = dict(
            kv_connector="FerryConnector",
            kv_connector_extra_config={"transport": contender},
        )
    hybrid = "nemotron" in Path(model).name
    return LLM(
        model=str(model),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + 64,
        max_num_seqs=4,
        disable_log_stats=True,
        enable_prefix_caching=False,
        num_gpu_blocks_override=48 if hybrid else 2 * (longest // BLOCK) + 16,
        **({} if hybrid else {"block_size": BLOCK}),
        kv_transfer_config=KVTransferConfig(kv_role=role, **how),
    )


def _loop(pipe, engine):
    core = engine.llm_engine.engine_core.engine_core
    pipe.send(())
    count, began, resting = 0, 0.0, False
    while True:
        if resting and not core.scheduler.has_requests():
            pipe.send(())
            resting = False
        if not core.scheduler.has_requests() or pipe.poll():
            question = pipe.recv()
            if question is None:
                return
            if not question:
                resting = True
                continue
            prompt, params = question
            sampling = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args={"kv_transfer_params": params},
            )
            count += 1
            began = time.perf_counter()
            engine.llm_engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)
        outputs, executed = core.step_fn()
        for output in (one for all_ in (outputs or {}).values() for one in all_.outputs):
            if not output.new_token_ids:
                raise RuntimeError(f"the request ended without a token: {output.finish_reason}")
            pipe.send((time.perf_counter() - began, output.kv_transfer_params))
            engine.llm_engine.output_processor.abort_requests([output.request_id], internal=True)
        core.post_step(executed)
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)


class Pair:
    def __init__(self, contender, model, longest):
        self.contender = contender
        self.prefill = Engine(contender, "kv_producer", model, longest)
        self.decode = Engine(contender, "kv_consumer", model, longest)

    def ready(self):
        for engine in (self.prefill, self.decode):
            engine.ready()
        self._signal(signal.SIGSTOP)

    def first_token(self, prompt):
        self._signal(signal.SIGCONT)
        _, params = self.prefill.ask(prompt, dict(environment.REMOTE_DECODE))
        assert params, f"{self.contender}: P hands nothing over"
        seconds, _ = self.decode.ask(prompt, params)
        for engine in (self.prefill, self.decode):
            engine.rest()
        self._signal(signal.SIGSTOP)
        return seconds

    def _signal(self, number):
        # NIXL's progress thread, as the rival sets it up, keeps a core busy even when idle. It does
        # so in its own turns only.
        if self.contender == RIVAL:
            for engine in (self.prefill, self.decode):
                os.kill(engine.process.pid, number)

    def close(self):
        self._signal(signal.SIGCONT)
        self.decode.close()
        self.prefill.close()


def measure(arguments, model, draw):
    """Seconds by contender and length; the length 0 stands for a pair's first request."""
    longest = max(arguments.lengths)
    measured = {contender: {} for contender in arguments.contenders}

    def prompt(length):
        return [draw.randrange(1, 500) for _ in range(length)]

    for start in range(arguments.starts):
        pairs = [Pair(contender, model, longest) for contender in arguments.contenders]
        try:
            for pair in pairs:
                pair.ready()
            for pair in draw.sample(pairs, len(pairs)):
                seconds = pair.first_token(prompt(arguments.lengths[0]))
                measured[pair.contender].setdefault(0, []).append(seconds)
                for length in arguments.lengths:
                    pair.first_token(prompt(length))
            for _ in range(start, arguments.rounds, arguments.starts):
                for length in arguments.lengths:
                    asked = prompt(length)
                    for pair in draw.sample(pairs, len(pairs)):
                        seconds = pair.first_token(asked)
                        measured[pair.contender].setdefault(length, []).append(seconds)
        finally:
            for pair in pairs:
                pair.close()
    return measured


def spread(seconds):
    """The median and its quartiles, in milliseconds."""
    if len(seconds) < 2:
        return (seconds[0] * 1e3,) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low * 1e3, middle * 1e3, high * 1e3


def ratio(ours, rivals, draw):
    """The ratio of medians, and where it lies in 95 % of resampled rounds."""
    seen = []
    for _ in range(400):
        rounds = draw.choices(range(len(ours)), k=len(ours))
        pick = [statistics.median(side[at] for at in rounds) for side in (ours, rivals)]
        seen.append(pick[0] / pick[1])
    seen.sort()
    return statistics.median(ours) / statistics.median(rivals), seen[10], seen[389]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3, help="how often the engines start anew")
    parser.add_argument("--lengths", default="100,512,1000,2048", help="tokens of the prompts")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="every time measured, in seconds")
    arguments = parser.parse_args()
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    arguments.contenders = arguments.contenders.split(",")
    if RIVAL not in arguments.contenders:
        parser.error(f"without {RIVAL} there is nothing to compare with")
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        MODELS[arguments.model]().save_pretrained(model)
        measured = measure(arguments, model, draw)
    if arguments.json:
        print(json.dumps(measured))
        return
    print(f"{arguments.model}: D's request to its first token, ms: median (quartiles)")
    ours = [contender for contender in arguments.contenders if contender != RIVAL]
    titles = ["prompt", *(title for name in ours for title in (name, "ratio")), RIVAL]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for length in [0, *arguments.lengths]:
        rival = measured[RIVAL][length]
        cells = [f"{length} tokens" if length else f"first, {arguments.lengths[0]} tokens"]
        for contender in (*ours, RIVAL):
            low, middle, high = spread(measured[contender][length])
            cells.append(f"{middle:.1f} ({low:.1f}–{high:.1f})")
            if contender != RIVAL:
                value, least, most = ratio(measured[contender][length], rival, draw)
                cells.append(f"**{value:.2f}** ({least:.2f}–{most:.2f})")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
