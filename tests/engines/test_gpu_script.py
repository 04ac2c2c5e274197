"""What `tools/check-gpu-vllm.sh` runs on a GPU, run here without one: the script itself must not rot."""

import argparse
import pathlib
import subprocess
import sys

import gpu_handover
import pytest
import torch


def test_it_passes_on_a_pair_that_is_right(serve, capsys):
    watched = {"prepare": [gpu_handover.watch], "extra": {"audit": "all", "advanced": {"min_read_ahead_seconds": 0.0}}}
    pushes = gpu_handover.PUSH | {"extra": {"audit": "all", "push": "always"}}
    prefill = serve("qwen3", "kv_producer", block_size=32, **watched | pushes)
    decode = serve("qwen3", "kv_consumer", block_size=96, **watched)
    gpu_handover.check("qwen3", prefill, decode, pushes=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("qwen3: every token right, 43 loads")
    assert "all audited" in line and "MiB in" in line and "GB/s" in line
    # Poison is poison: what is not moved is NaN.
    decode.call(gpu_handover.poison)
    assert decode.call(is_poisoned)


def test_it_passes_on_a_p_with_another_connector(serve, capsys):
    prefill = serve("qwen3", "kv_producer", block_size=32, **gpu_handover.STOCK)
    options = gpu_handover.FROM_STOCK["extra"] | {"transport": "nixl", "audit": "off"}
    decode = serve("qwen3", "kv_consumer", block_size=96, extra=options, prepare=[gpu_handover.watch])
    gpu_handover.check_stock("qwen3", prefill, decode)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("qwen3: every token right, 22 loads on cpu, of vLLM's own connector, ")


def is_poisoned(engine):
    return all(bool((storage == 0xFF).all()) for storage in gpu_handover.SIDES[0].storages)


class Engine:
    """Gives its answers in turn, and the last of them from then on."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def generate(self, prompt):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0], None


def test_what_an_engine_says_alone_is_right_even_if_rarely():
    alone = gpu_handover.Alone(Engine([7], [7], [8], [7]), Engine([7]), [[1, 2]])
    assert (alone.words(), alone.give([1, 2], [8])) == ("", True)
    assert alone.words() == " (alone, vLLM has several answers to 1 of 1 prompts)"
    assert not alone.give([1, 2], [9])
    assert alone.all_give([[1, 2]] * 2, [[7], [8]]) and not alone.all_give([[1, 2]] * 2, [[7], [9]])


def test_what_was_handed_over_is_no_judge():
    # D gives the right answer before, and from then on what it was handed.
    alone = gpu_handover.Alone(Engine([7]), Engine([7], [9]), [[1, 2]])
    assert not alone.give([1, 2], [9])


def test_engines_that_do_not_agree_cannot_be_judged():
    # One that sometimes agrees can.
    gpu_handover.Alone(Engine([7]), Engine([8], [8], [7], [8]), [[1, 2]])
    with pytest.raises(AssertionError, match="D alone has other tokens after 2"):
        gpu_handover.Alone(Engine([7]), Engine([8]), [[1, 2]])


def test_pairs_side_by_side_are_judged_one_by_one(monkeypatch, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "pair, options = sys.argv[1], sys.argv[2:]\n"
        "assert options[:4] == ['--jobs', '1', '--transport', 'nixl'] and options[-1].endswith(pair)\n"
        "print('a line of an engine')\n"
        "if pair == 'silent': sys.exit(3)\n"
        "print(f'{pair}: WRONG: other tokens' if pair == 'wrong' else f'{pair}: every token right')\n"
        "sys.exit(pair == 'wrong')\n"
    )
    monkeypatch.setattr(gpu_handover, "__file__", str(script))
    asked = argparse.Namespace(transport="nixl", kernel=None, models=tmp_path, jobs=2)
    pairs = ["qwen3", "silent", "gemma3", "wrong"]
    assert gpu_handover.side_by_side(pairs, asked) == ["silent", "wrong"]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "gemma3: every token right",
        "qwen3: every token right",
        "silent: WRONG: its process ended with 3",
        "wrong: WRONG: other tokens",
    ]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_handover.py", "qwen3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_handover.main() == 1
    assert capsys.readouterr().err.startswith("NOT CHECKED: ")


def test_every_line_of_an_error_names_its_pair(monkeypatch, tmp_path, capsys):
    def start(*_, **__):
        raise RuntimeError("Traceback:\n  a line\nthe cause")

    monkeypatch.setattr(gpu_handover, "Server", start)
    (tmp_path / "qwen3").mkdir()
    asked = argparse.Namespace(transport=None, kernel=None, models=tmp_path)
    assert gpu_handover.one_by_one(["qwen3"], asked) == ["qwen3"]
    said = capsys.readouterr().out.splitlines()
    assert said == ["qwen3: WRONG: Traceback:", "qwen3: WRONG:   a line", "qwen3: WRONG: the cause"]


def test_it_needs_no_more_than_it_asks_for():
    # It runs in the environment of whoever has vLLM and kvferry, and they have no pytest there.
    code = "import sys; sys.modules['pytest'] = None; import gpu_handover"
    subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, check=True, timeout=300)
