"""The commands of README.md, with real servers behind the real router, asked over HTTP.

Every answer must be the one that the decode server gives alone, whatever else happens, and afterwards
neither server may hold a block.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
import safetensors.torch
from environment import REMOTE_DECODE
from exact import without_hints
from http_pair import ANSWER, START, Pair, free_neighbours, save_tokenizer, until
from tiny import save_model

#: Few enough for the share that vLLM publishes to tell single blocks.
BLOCKS = 160
#: Seconds that a killed or silent side may keep the other's blocks.
LEASE = 30
SEPARATE = [
    *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
    # Says which requests are aborted.
    "--enable-log-requests",
    *("--max-model-len", "4096", "--num-gpu-blocks-override", str(BLOCKS)),
]
#: The one worker is in the engine's process, as it is on a GPU; on a CPU vLLM would make it one of its own, which takes
#: another import of vLLM. test_served_both.py has it so.
SMALL = [*SEPARATE, "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
PAIRS = {
    "hybrid, fail": ("nemotron_h", "fail", {}),
    "attention, recompute": ("qwen3", "recompute", {"transport": "local"}),
}


@contextlib.contextmanager
def served(tmp_path_factory, kind, serve, transfer, extra, only=None, **options):
    folder = tmp_path_factory.mktemp("served")
    save_tokenizer(save_model(kind, folder / kind))
    # One server after the other: what is sent to both at once is in test_served_both.py and life/test_push*.py.
    extra = {"lease_seconds": LEASE, "push": "never", "drain_signal": "SIGUSR2", **extra}
    pair = Pair(folder / kind, folder, serve, transfer, extra, only, **options)
    try:
        pair.start("prefill", "decode")
        pair.start("router")
        yield pair
    finally:
        pair.close()


@pytest.fixture(
    scope="module",
    params=["hybrid, fail", pytest.param("attention, recompute", marks=pytest.mark.more)],
)
def pair(request, tmp_path_factory):
    kind, policy, extra = PAIRS[request.param]
    transfer = {"kv_load_failure_policy": policy}
    with served(tmp_path_factory, kind, SMALL, transfer, extra) as pair:
        yield pair


def text(draw, length):
    return "".join(draw.choice("abcdefghij klmnopqrstuvwxyz,.") for _ in range(length))


def ask(pair, who, prompt, tokens=12, stream=False, timeout=ANSWER, **extra):
    """Text and tokens that a server, or the router, answers."""
    answer = pair.client(who).completions.create(
        model=pair.model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.0,
        stream=stream,
        timeout=timeout,
        extra_body={"ignore_eos": True, "return_token_ids": True, **extra},
    )
    if not stream:
        answer = [answer]
    choices = [chunk.choices[0] for chunk in answer]
    made = [token for choice in choices for token in choice.token_ids or ()]
    assert len(made) == tokens
    return "".join(choice.text for choice in choices), made


def chat(pair, who, content):
    answer = pair.client(who).chat.completions.create(
        model=pair.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=12,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    return choice.message.content, choice.token_ids


def moved(pair):
    """Tokens of prompts that the decode server did not compute."""
    return pair.metric("decode", "prompt_tokens_by_source_total", source="external_kv_transfer")


def aborted(pair, who):
    """Requests that a server ended because its client left: no metric counts those."""
    return len(re.findall(r"Request \S+ aborted", pair.log(who).read_text(errors="replace")))


def assert_no_block_is_held(pair, *who):
    for name in who or ("prefill", "decode"):
        until(
            f"every block of {name} comes back",
            LEASE + ANSWER,
            lambda name=name: pair.used_blocks(name, BLOCKS) == 0,
        )


def test_answers_are_those_of_one_server(pair):
    draw = random.Random(1)
    before = moved(pair)
    lengths = (1, 2, 127, 128, 129, 700)
    for length in lengths:
        prompt = text(draw, length)
        alone = ask(pair, "decode", prompt)
        assert ask(pair, "router", prompt) == alone, length
        streamed = ask(pair, "decode", prompt, stream=True)
        assert streamed[1] == alone[1]
        assert ask(pair, "router", prompt, stream=True) == streamed, length
    prompt = text(draw, 50)
    assert chat(pair, "router", prompt) == chat(pair, "decode", prompt)
    # Not because the decode server computed them: it may compute the last token of a prompt.
    assert moved(pair) - before >= 2 * sum(length - 1 for length in lengths) + 50
    assert_no_block_is_held(pair)


def test_several_answers_to_one_prompt(pair):
    prompt = text(random.Random(7), 300)
    alone = ask(pair, "decode", prompt)
    answer = pair.client("router").completions.create(
        model=pair.model,
        prompt=prompt,
        max_tokens=12,
        n=3,
        # vLLM takes no temperature of 0 with several answers.
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True},
    )
    assert [(choice.text, choice.token_ids) for choice in answer.choices] == [alone] * 3
    assert_no_block_is_held(pair)


def test_many_requests_at_once(pair):
    draw = random.Random(2)
    prompts = [text(draw, draw.randrange(1, 500)) for _ in range(32)]
    alone = [ask(pair, "decode", prompt) for prompt in prompts]
    before, counted = moved(pair), metrics(pair)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: ask(pair, "router", prompt), prompts)
        assert list(answers) == alone
    assert moved(pair) - before >= sum(len(prompt) - 1 for prompt in prompts)
    assert_no_block_is_held(pair)
    # A prompt of one token may have nothing to move.
    some = [prompt for prompt in prompts if len(prompt) > 1]

    def all_are_counted():
        grown = [now - then for now, then in zip(metrics(pair), counted)]
        return all(len(some) <= count <= len(prompts) for count in grown)

    def the_log_has_a_line():
        return "KV Transfer metrics: Loads=" in pair.log("decode").read_text(errors="replace")

    until("the metrics count every request", ANSWER, all_are_counted)
    # What ranks count comes with the loads; the first requests of a pair are always audited.
    assert pair.metric("decode", "kvferry_audits_matched_total") > 0
    assert pair.metric("decode", "kvferry_loads_total", outcome="failed", reason="mismatch") == 0
    until("the log has a line of them", ANSWER, the_log_has_a_line)


def metrics(pair):
    """What both servers have counted, from what a user's Prometheus sees."""
    return (
        pair.metric("decode", "kvferry_loads_total", outcome="done"),
        pair.metric("decode", "kvferry_load_seconds_count"),
        pair.metric("prefill", "kvferry_leases_granted_total"),
        pair.metric("prefill", "kvferry_leases_confirmed_total"),
    )


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are(pair):
    deploy = Path(__file__).parents[2] / "deploy"
    asked = {
        name
        for file in (deploy / "alerts.yaml", deploy / "grafana" / "kvferry.json")
        for name in re.findall(r"vllm:\w+", file.read_text())
    }
    assert len(asked) > 10
    exported = set()
    for who in ("prefill", "decode"):
        with urllib.request.urlopen(f"{pair.url(who)}/metrics", timeout=ANSWER) as answer:
            exported |= set(re.findall(r"^vllm:\w+", answer.read().decode(), re.MULTILINE))
    assert asked <= exported, sorted(asked - exported)


def prefill(pair, prompt, timeout=ANSWER):
    """What a router does first; the parameters in the answer are for the decode server."""
    answer = pair.client("prefill").completions.create(
        model=pair.model,
        prompt=prompt,
        max_tokens=1,
        timeout=timeout,
        extra_body={"kv_transfer_params": dict(REMOTE_DECODE)},
    )
    return answer.kv_transfer_params


def leave_while_the_answer_streams(pair, at):
    stream = pair.client("router").completions.create(
        model=pair.model,
        prompt=text(random.Random(at), 1000),
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in zip(range(at), stream, strict=False):
        pass
    stream.close()


def leave_early(pair, at):
    """Leaves at any time before the answer; prompts that wait for each other take long enough."""
    with contextlib.suppress(openai.APITimeoutError):
        if at % 2:
            prefill(pair, text(random.Random(at), 3000), timeout=0.05 * at)
        else:
            ask(pair, "router", text(random.Random(at), 3000), timeout=0.05 * at)


def test_aborts_cost_nobody_else_anything(pair):
    draw = random.Random(3)
    prompts = [text(draw, 300) for _ in range(4)]
    alone = [ask(pair, "decode", prompt) for prompt in prompts]
    before = {who: aborted(pair, who) for who in ("prefill", "decode")}
    with ThreadPoolExecutor(32) as pool:
        left = [pool.submit(leave_while_the_answer_streams, pair, at) for at in range(8)]
        left += [pool.submit(leave_early, pair, at) for at in range(1, 17)]
        answers = pool.map(lambda prompt: ask(pair, "router", prompt), prompts)
        assert list(answers) == alone
    for one in left:
        one.result()
    for who, count in before.items():
        until(f"{who} hears of it", ANSWER, lambda who=who, count=count: aborted(pair, who) > count)
    assert_no_block_is_held(pair)


def test_a_lease_that_nobody_uses_ends(pair):
    prefill(pair, text(random.Random(4), 400))
    assert pair.used_blocks("prefill", BLOCKS) > 0
    assert_no_block_is_held(pair)


def canary(pair, *arguments):
    """What an operator runs: its exit code, and what it says."""
    run = [sys.executable, "-m", "kvferry.vllm.canary", "--json", "--timeout", str(ANSWER)]
    done = subprocess.run([*run, *arguments], capture_output=True, text=True, timeout=2 * ANSWER)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_canary_sings(pair):
    before = moved(pair)
    code, said = canary(pair, pair.url("router"), "--decode", pair.url("decode"))
    assert (code, said["agree"], said["compared"]) == (0, True, True), said
    lengths = [case["length"] for case in said["cases"]]
    assert lengths[-1] > 1000 and moved(pair) - before >= sum(lengths) - len(lengths)
    servers = ("--prefill", pair.url("prefill"), "--decode", pair.url("decode"))
    code, said = canary(pair, *servers, "--lengths", "130")
    assert (code, said["agree"]) == (0, True), said
    assert_no_block_is_held(pair)


class Wrong(BaseHTTPRequestHandler):
    """A router that lets the prefill server read another prompt, and does not pass on what it says of it."""

    pair = None

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        other = [token + 1 for token in asked["prompt"][:-1]] + asked["prompt"][-1:]
        first = self.pass_on("prefill", asked, other, 1, dict(REMOTE_DECODE))
        params = without_hints(first["kv_transfer_params"])
        try:
            said = self.pass_on("decode", asked, asked["prompt"], None, params)
            said, status = json.dumps(said).encode(), 200
        except urllib.error.HTTPError as error:
            said, status = error.read(), error.code
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def pass_on(self, who, asked, prompt, tokens, params):
        asked = asked | {"prompt": prompt, "kv_transfer_params": params}
        asked["max_tokens"] = tokens or asked["max_tokens"]
        request = urllib.request.Request(
            f"{self.pair.url(who)}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return json.loads(answer.read())


def test_what_was_computed_from_another_prompt_is_refused(pair):
    handler = type("WrongPair", (Wrong,), {"pair": pair})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as wrong:
        threading.Thread(target=wrong.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{wrong.server_port}"
        code, said = canary(pair, url, "--decode", pair.url("decode"), "--lengths", "64,300", "--seed", "1")
        wrong.shutdown()
    if pair.transfer["kv_load_failure_policy"] == "recompute":
        assert code == 0 and [case["verdict"] for case in said["cases"]] == ["agree"] * 2, said
    else:
        assert code == 3 and "500" in said["error"], said
    assert_no_block_is_held(pair)
    # Which request, both digests, and what to do.
    log, words = pair.log("decode"), ".*computed from another prompt.*"
    (line, *_) = until("the log says so", ANSWER, lambda: re.findall(words, log.read_text()))
    assert re.search(r"request=\S+", line) and len(set(re.findall(r"\b[0-9a-f]{32}\b", line))) == 2, line
    assert "Send the same prompt" in line


def operate(*words):
    """What the command says that operators use, and its exit code."""
    command = [os.environ["KVFERRY_COMMAND"], *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_server_that_drains(pair):
    """It hands over what it has promised and nothing else; whoever comes later loses no more than time."""
    draw = random.Random(23)
    promised, late = text(draw, 300), text(draw, 300)
    alone = {prompt: ask(pair, "decode", prompt) for prompt in (promised, late)}
    log = pair.log("prefill")
    address = re.findall(r"`kvferry drain (\S+)`", log.read_text())[-1]
    process = re.findall(r"so does SIGUSR2 to process (\d+)", log.read_text())[-1]

    before = moved(pair)
    params = prefill(pair, promised)
    os.kill(int(process), signal.SIGUSR2)
    until("it drains", ANSWER, lambda: "drains: nothing new is handed over" in log.read_text())
    code, said = operate("drain", address, "--wait", "0")
    assert (code, said) == (
        0,
        "not drained yet: 1 request kept for others, 0 requests kept by others for it\n",
    )

    # Before anything else: what is promised is kept for no longer than a lease.
    assert ask(pair, "decode", promised, kv_transfer_params=params) == alone[promised]
    assert moved(pair) > before
    code, said = operate("status", address)
    assert code == 0 and "draining: it hands over nothing new" in said, said
    before = moved(pair)
    assert ask(pair, "router", late) == alone[late]
    assert moved(pair) == before
    code, said = operate("drain", address)
    assert code == 0 and said.endswith("drained: nothing is left\n"), said
    until("that is said", ANSWER, lambda: "drained: nothing is kept" in log.read_text())

    code, said = operate("drain", address, "--undo")
    assert (code, said) == (0, "it hands over again\n")
    before = moved(pair)
    assert ask(pair, "router", late) == alone[late]
    assert moved(pair) > before
    assert_no_block_is_held(pair)


# The last two: they end the prefill server.
def test_a_killed_prefill_server(pair):
    draw = random.Random(5)
    prompt = text(draw, 400)
    alone = ask(pair, "decode", prompt)
    params = prefill(pair, prompt)
    # One answer is on its way when it happens: what has been moved is the decode server's own.
    stream = pair.client("router").completions.create(
        model=pair.model, prompt=prompt, max_tokens=400, stream=True, temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    chunks = iter(stream)
    made = list(next(chunks).choices[0].token_ids or ())
    pair.kill("prefill")
    for chunk in chunks:
        made += chunk.choices[0].token_ids or ()
    assert made == ask(pair, "decode", prompt, 400)[1]

    # What it promised and can no longer keep.
    if pair.transfer["kv_load_failure_policy"] == "recompute":
        assert ask(pair, "decode", prompt, kv_transfer_params=params) == alone
    else:
        with pytest.raises(openai.APIStatusError) as error:
            ask(pair, "decode", prompt, kv_transfer_params=params)
        assert error.value.status_code >= 500
    with pytest.raises(openai.APIStatusError):
        ask(pair, "router", prompt)
    until("D is well", ANSWER, lambda: pair.healthy("decode"))
    assert ask(pair, "decode", prompt) == alone
    assert_no_block_is_held(pair, "decode")

    # It comes back where it was, and the router notices by itself.
    pair.start("prefill")
    before = moved(pair)
    end = time.monotonic() + START
    answer = None
    while answer is None:
        assert time.monotonic() < end, "the router does not see that the server is back"
        with contextlib.suppress(openai.APIStatusError):
            answer = ask(pair, "router", prompt)
    assert answer == alone
    assert moved(pair) - before >= len(prompt) - 1
    assert_no_block_is_held(pair)


@pytest.mark.more
def test_the_canary_falls_silent_when_a_pair_is_wrong(pair):
    """The two servers have other weights: everything is as it was granted, and the answers are wrong."""
    pair.kill("prefill")
    path = Path(pair.model) / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    for name, weight in weights.items():
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
            weights[name] = weight.flip(0).contiguous()
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    pair.start("prefill")
    servers = ("--prefill", pair.url("prefill"), "--decode", pair.url("decode"))
    code, said = canary(pair, *servers, "--lengths", "64,300", "--seed", "1")
    assert code == 1 and [case["verdict"] for case in said["cases"]] == ["differ"] * 2, said
    assert_no_block_is_held(pair)


@pytest.mark.more
def test_data_parallel_engines_have_an_address_each(tmp_path_factory):
    # vLLM's engines of one server count on from the port.
    port = free_neighbours()
    only = {"prefill": {"port": port}}
    serve = [*SEPARATE, "--data-parallel-size", "2"]
    # Twelve processes: on a small machine even a handshake waits for its turn.
    with served(tmp_path_factory, "qwen3", serve, {}, {"handshake_timeout_seconds": 60.0}, only) as pair:
        draw = random.Random(6)
        prompts = [text(draw, draw.randrange(50, 500)) for _ in range(16)]
        alone = [ask(pair, "decode", prompt) for prompt in prompts]
        before = moved(pair)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda prompt: ask(pair, "router", prompt), prompts)
            assert list(answers) == alone
        assert moved(pair) - before >= sum(len(prompt) - 1 for prompt in prompts)
        for who in ("prefill", "decode"):
            for engine in "01":
                assert pair.metric(who, "prompt_tokens_total", engine=engine) > 0, (who, engine)
        ports = {prefill(pair, prompt)["remote_port"] for prompt in prompts}
        assert ports == {port, port + 1}
        assert_no_block_is_held(pair)
