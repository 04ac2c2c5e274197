"""Does a running pair answer as one server alone does? `python -m kvferry.vllm.canary http://router`

Sends a few prompts through the router and the same ones straight to the decode server (--decode), which
then computes them itself, and compares the tokens. A pair that answers otherwise moves wrong bytes, or runs
two models. Without a router, --prefill and --decode are asked as a router would ask them. A router alone
shows that the pair answers, but leaves nothing to compare with.

Exit codes: 0 all answers agree, 1 some do not, 2 wrong arguments, 3 no answer (in time).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

AGREE, DIFFER, USAGE, SILENT = 0, 1, 2, 3

#: Prompts within a block, at the edges of common blocks, and above the largest that vLLM makes of them
#: for hybrids; those that the model's context has no room for are left out.
LENGTHS = (1, 17, 64, 130, 530, 1200)
#: How a router asks for a prompt's blocks to be kept.
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Two tokens whose chances are this close (in logarithms) may change places by rounding alone: a pair
#: splits a prompt where one server does not.
NEAR_TIE = 0.05


_RECOMPUTED = re.compile(r"^vllm:kvferry_prompts_recomputed_total\{([^}]*)\} ([0-9.e+]+)$", re.M)
_REASON = re.compile(r'(?:^|,)reason="([^"]*)"')


class NoAnswer(Exception):
    """A server that does not answer, or not as it should."""


@dataclass
class Answer:
    tokens: list[int] | list[str]
    #: For each token the likeliest ones and the logarithm of their chance, where the server says them.
    chances: list[dict[str, float]] | None


@dataclass
class Case:
    """One prompt, asked both ways."""

    length: int
    #: `agree`, `near tie` or `differ`.
    verdict: str
    #: Tokens up to the first that differs.
    same: int
    of: int
    says: str


def main(arguments: list[str] | None = None) -> int:
    asked = _arguments(arguments)
    begin = time.monotonic()
    deadline = begin + asked.timeout
    cases: list[Case] = []
    error = None
    pair, before = None, None
    try:
        pair = Pair(asked, deadline)
        before = pair.recomputed()
        for case in pair.cases():
            cases.append(case)
            if not (asked.json or asked.quiet):
                mark = {"agree": "ok", "near tie": "--", "differ": "NO"}[case.verdict]
                print(f"  {mark}  {case.length:>6} tokens  {case.says}", flush=True)
    except NoAnswer as failure:
        error = str(failure)
    wrong = [case for case in cases if case.verdict == "differ"]
    code = DIFFER if wrong else SILENT if error is not None else AGREE
    after = pair.recomputed() if pair is not None and before is not None else None
    meanwhile = since(before, after)
    if asked.json:
        report = {
            "agree": code == AGREE,
            "compared": asked.decode is not None,
            "seconds": round(time.monotonic() - begin, 3),
            "error": error,
            "recomputed": meanwhile,
            "recomputed_since_start": after,
            "cases": [asdict(case) for case in cases],
        }
        print(json.dumps(report))
        return code
    if wrong:
        lengths = ", ".join(str(case.length) for case in wrong)
        print(f"WRONG: other tokens than the decode server alone, for prompts of {lengths} tokens")
    if error is not None:
        print(f"no answer: {error}", file=sys.stderr)
    if meanwhile and any(meanwhile.values()):
        # Its own among them were compared with themselves.
        told = ", ".join(f"{count} ({reason})" for reason, count in meanwhile.items() if count)
        print(f"COMPUTED: the decode server computed prompts meanwhile that prefill had computed: {told}")
    elif after and any(after.values()) and not asked.quiet:
        told = ", ".join(f"{count} ({reason})" for reason, count in after.items() if count)
        print(f"since it started, the decode server has computed prompts that prefill had computed: {told}")
    if code == AGREE and not asked.quiet:
        what = "agree with the decode server alone" if asked.decode else "answered; nothing to compare with"
        print(f"{len(cases)} prompts {what}")
    return code


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.vllm.canary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("router", nargs="?", help="URL of the router")
    parser.add_argument("--decode", metavar="URL", help="the decode server, to compare with")
    parser.add_argument(
        "--prefill", metavar="URL", help="the prefill server, where there is no router to ask"
    )
    parser.add_argument("--model", help="its name; the first that the servers list if left out")
    parser.add_argument("--key", help="API key of the servers (sent as a bearer token)")
    parser.add_argument("--tokens", type=int, default=16, help="to compare for each prompt (16)")
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="of the prompts, in tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of the prompts; another one each time if left out")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything (60)")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")
    parser.add_argument("--json", action="store_true", help="answer as JSON, for programs")
    asked = parser.parse_args(given)
    try:
        asked.lengths = [int(length) for length in asked.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths is '{asked.lengths}', but must be numbers with commas between them")
    if not asked.lengths or min(asked.lengths) < 1 or max(asked.lengths) > 100_000:
        parser.error("--lengths must be from 1 to 100000")
    if not 1 <= asked.tokens <= 1000:
        parser.error(f"--tokens is {asked.tokens}, but must be from 1 to 1000")
    if not 0 < asked.timeout <= 3600:
        parser.error(f"--timeout is {asked.timeout}, but must be from 0 to 3600 seconds")
    if asked.router is None and (asked.prefill is None or asked.decode is None):
        parser.error("give a router's URL, or both --prefill and --decode")
    if asked.router is not None and asked.prefill is not None:
        parser.error("--prefill is for pairs without a router: leave one of them out")
    for url in (asked.router, asked.decode, asked.prefill):
        if url is not None and urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            parser.error(f"'{url}' is not a URL: it should start with http:// or https://")
    return asked


class Pair:
    """The servers, asked one question after the other."""

    def __init__(self, asked: argparse.Namespace, deadline: float) -> None:
        self.asked, self.deadline = asked, deadline
        served = self._get(asked.decode or asked.router, "/v1/models").get("data") or []
        names = [str(one.get("id")) for one in served]
        if asked.model is not None and names and asked.model not in names:
            raise NoAnswer(f"there is no model '{asked.model}', only {', '.join(names)}")
        if asked.model is None and not names:
            raise NoAnswer(f"{asked.decode or asked.router} lists no model: name one with --model")
        self.model = asked.model or names[0]
        rooms = [one.get("max_model_len") for one in served if one.get("id") == self.model]
        self.room = rooms[0] if rooms and isinstance(rooms[0], int) else None

    def recomputed(self) -> dict[str, int] | None:
        """Prompts that the decode server has computed although prefill had, by the reason; None where it does not say."""
        if self.asked.decode is None:
            return None
        request = urllib.request.Request(self.asked.decode.rstrip("/") + "/metrics")
        left = self.deadline - time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=max(0.001, min(left, 10))) as answer:
                text = _whole(answer, self.deadline).decode()
        except (OSError, ValueError):
            return None
        counts: dict[str, int] = {}
        for labels, count in _RECOMPUTED.findall(text):
            # Of each engine, where there are several.
            reason = _REASON.search(labels)
            if reason is not None:
                counts[reason[1]] = counts.get(reason[1], 0) + int(float(count))
        return counts or None

    def cases(self) -> Iterator[Case]:
        draw = random.Random(self.asked.seed)
        lengths = [
            length
            for length in self.asked.lengths
            if self.room is None or length + self.asked.tokens <= self.room
        ]
        if not lengths:
            raise NoAnswer(
                f"the model has room for {self.room} tokens, fewer than any of --lengths and --tokens need"
            )
        for length in lengths:
            # Low numbers are tokens in every vocabulary; fresh ones, so that no server has them cached.
            prompt = [draw.randrange(10, 250) for _ in range(length)]
            # First through the pair: what it does not move must not be on the decode server already.
            moved = self._through_the_pair(prompt)
            if self.asked.decode is None:
                yield Case(length, "agree", len(moved.tokens), self.asked.tokens, "answered")
                continue
            # A salt keeps the server from using what the pair has left in its prefix cache.
            salt = f"canary-{draw.getrandbits(64):x}"
            alone = self._complete(self.asked.decode, prompt, cache_salt=salt)
            yield compare(length, alone, moved)

    def _through_the_pair(self, prompt: list[int]) -> Answer:
        if self.asked.router is not None:
            return self._complete(self.asked.router, prompt)
        first = self._post(self.asked.prefill, self._question(prompt, 1, kv_transfer_params=KEEP))
        params = first.get("kv_transfer_params")
        if not params:
            raise NoAnswer(
                f"{self.asked.prefill} hands over nothing (no kv_transfer_params in its answer): does it "
                "run with --kv-transfer-config?"
            )
        return self._complete(self.asked.decode, prompt, kv_transfer_params=params)

    def _complete(self, url: str, prompt: list[int], **more: Any) -> Answer:
        answer = self._post(url, self._question(prompt, self.asked.tokens, **more))
        try:
            (choice,) = answer["choices"]
            told = choice.get("logprobs") or {}
            tokens = choice.get("token_ids") or told.get("tokens") or []
            chances = told.get("top_logprobs")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NoAnswer(f"{url} does not answer as OpenAI's API does: {str(answer)[:200]}") from error
        if not tokens:
            raise NoAnswer(f"{url} answers without tokens (neither token_ids nor logprobs)")
        return Answer(list(tokens), chances)

    def _question(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
            **more,
        }

    def _get(self, url: str, path: str) -> dict[str, Any]:
        return self._ask(urllib.request.Request(url.rstrip("/") + path))

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(url.rstrip("/") + "/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return self._ask(request)

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        if self.asked.key is not None:
            request.add_header("Authorization", f"Bearer {self.asked.key}")
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise NoAnswer(f"not done within {self.asked.timeout:g} s")
        try:
            with urllib.request.urlopen(request, timeout=left) as answer:
                made = json.loads(_whole(answer, self.deadline))
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace").strip()
            raise NoAnswer(f"{request.full_url} answers {error.code}: {said}") from error
        except TimeoutError as error:
            raise NoAnswer(f"{request.full_url}: not within {self.asked.timeout:g} s") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise NoAnswer(f"{request.full_url}: {why}") from error
        if not isinstance(made, dict):
            raise NoAnswer(f"{request.full_url} answers {str(made)[:100]}, not an object")
        return made


def _whole(answer: Any, deadline: float) -> bytes:
    """All of an answer, before the deadline even if it comes in drops."""
    parts = []
    while part := answer.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def since(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """What was counted meanwhile; what a server that was started anew has counted since then."""
    if before is None or after is None:
        return None
    counted = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return {reason: count if count >= 0 else after[reason] for reason, count in counted.items()}


def compare(length: int, alone: Answer, moved: Answer) -> Case:
    """Whether two answers are the same, but for a tie that rounding may decide."""
    of = max(len(alone.tokens), len(moved.tokens))
    pairs = zip(alone.tokens, moved.tokens, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if same is None and len(alone.tokens) == len(moved.tokens):
        return Case(length, "agree", of, of, f"{of} tokens agree")
    if same is None:
        same = min(len(alone.tokens), len(moved.tokens))
        says = f"{len(moved.tokens)} tokens instead of {len(alone.tokens)}"
        return Case(length, "differ", same, of, says)
    gap = _gap(alone, same)
    if gap is not None and gap < NEAR_TIE and _likeliest(alone, same) == _likeliest(moved, same):
        says = f"{same} of {of} tokens agree; then the two likeliest are {gap:.3f} apart, which rounding decides"
        return Case(length, "near tie", same, of, says)
    says = f"token {same} differs: {moved.tokens[same]!r} instead of {alone.tokens[same]!r}"
    return Case(length, "differ", same, of, says)


def _gap(answer: Answer, at: int) -> float | None:
    """How far the likeliest two tokens are apart at a place."""
    try:
        chances = sorted((answer.chances or [])[at].values(), reverse=True)
        return chances[0] - chances[1]
    except (AttributeError, IndexError, TypeError):
        return None


def _likeliest(answer: Answer, at: int) -> set[str]:
    """The likeliest two tokens at a place: rounding swaps them, but brings in no third."""
    try:
        chances = (answer.chances or [])[at]
        return set(sorted(chances, key=chances.__getitem__, reverse=True)[:2])
    except (AttributeError, IndexError, TypeError):
        return set()


if __name__ == "__main__":
    sys.exit(main())
