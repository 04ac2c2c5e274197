"""The canary notices a pair that is wrong, one that is silent, and what it is told wrongly; it stays within
its time. A pair of real servers is asked in tests/engines/test_served.py."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kvferry.vllm import canary


class Server:
    """Answers each prompt with the tokens after it, but for what `change` makes of them."""

    def __init__(self, change=lambda tokens, asked: tokens, room=4096, gap=1.0, runner_up=None):
        self.asked, self.change, self.room, self.gap, self.runner_up = [], change, room, gap, runner_up
        #: Prompts that it computed although another had, by the reason; with engines of its own.
        self.counted = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                if self.path == "/metrics":
                    self.answer(200 if server.counted else 404, server.metrics())
                    return
                one = {"id": "tiny", "max_model_len": server.room}
                self.answer(200, {"data": [one]})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked["authorization"] = self.headers.get("Authorization")
                server.asked.append(asked)
                try:
                    self.answer(200, server.complete(asked))
                except RuntimeError as error:
                    self.answer(500, {"error": str(error)})

            def answer(self, code, body):
                said = (body if isinstance(body, str) else json.dumps(body)).encode()
                with contextlib.suppress(BrokenPipeError):
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def metrics(self):
        name = "vllm:kvferry_prompts_recomputed"
        lines = [f"# HELP {name}_total Prompts.", f"# TYPE {name}_total counter", "vllm:other_total{reason=\"gone\"} 9.0"]
        for engine in "01":
            for reason, count in self.counted.items():
                lines.append(f'{name}_total{{engine="{engine}",model_name="tiny",reason="{reason}"}} {float(count)}')
                lines.append(f'{name}_created{{engine="{engine}",model_name="tiny",reason="{reason}"}} 1.7e+09')
        return "\n".join(lines) + "\n"

    def complete(self, asked):
        first = sum(asked["prompt"])
        tokens = [(first + at) % 251 for at in range(asked["max_tokens"])]
        made = self.change(tokens, asked)
        second = self.runner_up(tokens, asked) if self.runner_up else ["other"] * len(made)
        chances = [
            {str(one): -1.0, str(other): -1.0 - self.gap}
            for one, other in zip(made, second, strict=False)
        ]
        choice = {"token_ids": made, "logprobs": {"top_logprobs": chances}}
        return {"choices": [choice], "kv_transfer_params": {"remote_engine_id": "p"}}

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as opened:

        def start(*args, **options):
            return opened.enter_context(contextlib.closing(Server(*args, **options)))

        yield start


def ask(capsys, *arguments):
    code = canary.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_pair_that_agrees(serve, capsys):
    router, decode = serve(), serve()
    code, said = ask(capsys, router.url, "--decode", decode.url, "--key", "secret")
    assert (code, said["agree"], said["compared"], said["error"]) == (0, True, True, None)
    assert [case["length"] for case in said["cases"]] == list(canary.LENGTHS)
    assert [case["verdict"] for case in said["cases"]] == ["agree"] * len(canary.LENGTHS)
    # Each prompt once to both, greedily, and computed afresh by the one that answers alone.
    assert [len(one["prompt"]) for one in router.asked] == list(canary.LENGTHS)
    assert [one["prompt"] for one in router.asked] == [one["prompt"] for one in decode.asked]
    assert {one["temperature"] for one in router.asked + decode.asked} == {0.0}
    assert all("cache_salt" not in one for one in router.asked)
    assert len({one["cache_salt"] for one in decode.asked}) == len(canary.LENGTHS)
    assert {one["authorization"] for one in router.asked} == {"Bearer secret"}


def test_other_prompts_each_time_unless_seeded(serve, capsys):
    router = serve()
    for seed in ((), (), ("--seed", "7"), ("--seed", "7")):
        ask(capsys, router.url, "--lengths", "64", *seed)
    one, other, seeded, again = [asked["prompt"] for asked in router.asked]
    assert one != other and seeded == again


def late(tokens, asked):
    """Wrong from the tenth token on, for prompts that fill a block."""
    if len(asked["prompt"]) <= 64:
        return tokens
    return [*tokens[:9], *(token + 1 for token in tokens[9:])]


def test_a_pair_that_is_wrong(serve, capsys):
    router, decode = serve(late), serve()
    code, said = ask(capsys, router.url, "--decode", decode.url)
    assert code == 1 and not said["agree"]
    wrong = [case for case in said["cases"] if case["verdict"] == "differ"]
    assert [case["length"] for case in wrong] == [length for length in canary.LENGTHS if length > 64]
    assert all((case["same"], case["of"]) == (9, 16) for case in wrong)
    code = canary.main([router.url, "--decode", decode.url, "--quiet"])
    said = capsys.readouterr()
    assert code == 1
    assert said.out == (
        "WRONG: other tokens than the decode server alone, for prompts of 130, 530, 1200 tokens\n"
    )


def test_fewer_tokens_are_wrong_too(serve, capsys):
    router, decode = serve(lambda tokens, asked: tokens[:-1]), serve()
    code, said = ask(capsys, router.url, "--decode", decode.url, "--lengths", "17")
    assert code == 1 and said["cases"][0]["says"] == "15 tokens instead of 16"


def test_a_tie_that_rounding_decides_is_not_wrong(serve, capsys):
    as_it_is = lambda tokens, asked: tokens  # noqa: E731
    router = serve(late, gap=0.01, runner_up=as_it_is)
    decode = serve(as_it_is, gap=0.01, runner_up=late)
    code, said = ask(capsys, router.url, "--decode", decode.url, "--lengths", "130")
    assert code == 0 and said["cases"][0]["verdict"] == "near tie"
    assert "0.010 apart" in said["cases"][0]["says"]


def test_a_token_that_was_in_no_tie_is_wrong(serve, capsys):
    router, decode = serve(late, gap=0.01), serve(gap=0.01)
    code, said = ask(capsys, router.url, "--decode", decode.url, "--lengths", "130")
    assert code == 1 and said["cases"][0]["verdict"] == "differ"


def test_without_a_router_it_hands_over_itself(serve, capsys):
    prefill, decode = serve(), serve()
    code, said = ask(capsys, "--prefill", prefill.url, "--decode", decode.url, "--lengths", "17,64")
    assert code == 0 and said["compared"]
    assert [one["kv_transfer_params"] for one in prefill.asked] == [canary.KEEP] * 2
    assert [one["max_tokens"] for one in prefill.asked] == [1, 1]
    moved, alone = decode.asked[:2]
    assert moved["kv_transfer_params"] == {"remote_engine_id": "p"}
    assert "kv_transfer_params" not in alone


def test_a_router_alone_is_said_not_to_be_compared(serve, capsys):
    router = serve()
    code, said = ask(capsys, router.url, "--lengths", "17")
    assert code == 0 and not said["compared"]
    assert canary.main([router.url, "--lengths", "17"]) == 0
    assert "1 prompts answered; nothing to compare with" in capsys.readouterr().out


def test_prompts_that_the_model_has_no_room_for_are_left_out(serve, capsys):
    router = serve(room=100)
    _, said = ask(capsys, router.url)
    assert [case["length"] for case in said["cases"]] == [1, 17, 64]
    code, said = ask(capsys, router.url, "--lengths", "90")
    assert code == 3 and "room for 100 tokens" in said["error"]


def no_blocks(tokens, asked):
    raise RuntimeError("the load failed")


def test_an_error_is_no_answer(serve, capsys):
    router, decode = serve(no_blocks), serve()
    code, said = ask(capsys, router.url, "--decode", decode.url)
    assert code == 3 and "answers 500" in said["error"] and "the load failed" in said["error"]
    code, said = ask(capsys, "http://127.0.0.1:9", "--decode", decode.url)
    assert code == 3 and "http://127.0.0.1:9" in said["error"]
    code, said = ask(capsys, decode.url, "--model", "other")
    assert code == 3 and said["error"] == "there is no model 'other', only tiny"


def test_it_ends_in_time(serve, capsys):
    enough = threading.Event()
    router = serve(lambda tokens, asked: enough.wait(60) and tokens)
    code, said = ask(capsys, router.url, "--timeout", "0.3")
    enough.set()
    assert code == 3 and "not within 0.3 s" in said["error"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a router's URL, or both --prefill and --decode"),
        (["--decode", "http://d"], "give a router's URL, or both --prefill and --decode"),
        (["http://r", "--prefill", "http://p"], "leave one of them out"),
        (["router:80"], "'router:80' is not a URL"),
        (["http://r", "--lengths", "a"], "--lengths is 'a'"),
        (["http://r", "--lengths", "0"], "--lengths must be from 1"),
        (["http://r", "--tokens", "0"], "--tokens is 0"),
        (["http://r", "--timeout", "0"], "--timeout is 0"),
    ],
)
def test_wrong_arguments(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        canary.main(arguments)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_prompts_that_were_computed_twice_are_said_by_reason(serve, capsys):
    """The pair's own answer is compared with itself where the decode server computed it."""
    router, decode = serve(), serve()
    arguments = (router.url, "--decode", decode.url, "--lengths", "17,64")
    # A server that does not count, or counts under another name.
    code, said = ask(capsys, *arguments)
    assert (code, said["recomputed"], said["recomputed_since_start"]) == (0, None, None)
    decode.counted = {"gone": 2, "params": 0}
    code, said = ask(capsys, *arguments)
    assert (said["recomputed"], said["recomputed_since_start"]) == ({"gone": 0, "params": 0}, {"gone": 4, "params": 0})
    assert canary.main(list(arguments)) == 0
    assert "since it started, the decode server has computed prompts that prefill had computed: 4 (gone)" in (
        capsys.readouterr().out
    )

    def fails(tokens, asked):
        decode.counted["params"] += "cache_salt" not in asked
        return tokens

    router.change = fails
    code, said = ask(capsys, *arguments)
    assert (code, said["recomputed"]) == (0, {"gone": 0, "params": 4})
    assert canary.main([*arguments, "--quiet"]) == 0
    assert "COMPUTED: the decode server computed prompts meanwhile that prefill had computed: 4 (params)" in (
        capsys.readouterr().out
    )
    # It was started anew.
    assert canary.since({"gone": 9}, {"gone": 1}) == {"gone": 1}


def test_a_server_whose_figures_do_not_come_is_asked_all_the_same(serve, capsys, monkeypatch):
    router, decode = serve(), serve()
    decode.counted = {"gone": 1}
    monkeypatch.setattr(Server, "metrics", lambda self: "\x00{not metrics")
    code, said = ask(capsys, router.url, "--decode", decode.url, "--lengths", "17")
    assert (code, said["recomputed"]) == (0, None)
