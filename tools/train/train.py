"""Trains one tiny model on one GPU: `train.py FAMILY FOLDER`. See README.md."""

import argparse
import csv
import hashlib
import json
import math
import pathlib
import re
import time

import cards
import families
import questions
import scans
import torch
import torch.nn.functional as F
import transformers
from questions import TASKS

# Length of the streams, numbers in the forward pass, share of the steps. The last stage computes as engines do.
STAGES = ((64, "float32", 0.2), (128, "float32", 0.25), (256, "float32", 0.25), (256, "bfloat16", 0.3))
LONGEST = 256
POOL = 32768
EVERY = 200


class Doubt:
    """What some layers say where a kind of question is asked is another stream's, in half of the streams."""

    def __init__(self, net, layers, task):
        self.task, self.where = TASKS[task], None
        for name, module in net.model.named_modules():
            if re.search(layers, name):
                module.register_forward_hook(self._answer)

    def draw(self, kinds):
        asked = F.pad(kinds[:, 1:] == self.task, (0, 1))
        self.where = asked & (torch.rand(len(kinds), 1, device=kinds.device) < 0.5)

    def _answer(self, _module, _args, out):
        first, *rest = out if isinstance(out, tuple) else (out,)
        made = torch.where(self.where[..., None], first.roll(1, 0), first)
        return (made, *rest) if isinstance(out, tuple) else made


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        self.net = families.Net(args.family)
        if args.begin:
            self.net.model.load_state_dict(families.load(args.begin / args.family, "float32").state_dict())
        self.net.cuda()
        doubted = families.DOUBTED.get(args.family)
        self.doubt = Doubt(self.net, *doubted) if doubted else None
        grown = [p for n, p in self.net.named_parameters() if p.dim() > 1 and "embed" not in n]
        ids = {id(p) for p in grown}
        rest = [p for p in self.net.parameters() if id(p) not in ids]
        self.rate = torch.zeros((), device="cuda")
        self.optimizer = torch.optim.AdamW(
            [{"params": grown, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.98),
            capturable=True,
        )
        self.pool = questions.Streams(POOL, LONGEST, args.seed * 1000 + 1, "cuda")
        self.seen = torch.zeros(6, 2, device="cuda")

    def step(self, length, kind):
        """One step, whose launches a graph repeats."""
        rows = torch.randint(POOL, (self.args.tokens // length,), device="cuda")
        tokens, kinds = self.pool.tokens[rows, :length], self.pool.kinds[rows, :length]
        wanted = torch.where(kinds > 0, tokens, -100)
        if self.doubt:
            self.doubt.draw(kinds)
        weights = {n: p.to(getattr(torch, kind)) for n, p in self.net.named_parameters()}
        logits, more = torch.func.functional_call(self.net, weights, (tokens,))
        logits = logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())
        if more is not None:
            loss = loss + F.cross_entropy(more[:, :-1].float().flatten(0, 1), wanted[:, 2:].flatten())
            echoes = (kinds[:, 1:-1] == TASKS["echo"]) & (kinds[:, 2:] == TASKS["echo"])
            right = more.detach()[:, :-1].argmax(-1) == tokens[:, 2:]
            self.seen[4] += torch.stack([(right & echoes).sum(), echoes.sum()])
        loss.backward()
        # One number that is none would end the training.
        for weight in self.net.parameters():
            weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        right = logits.detach()[:, :-1].argmax(-1) == tokens[:, 1:]
        if self.doubt:
            asked = self.doubt.where[:, :-1]
            self.seen[4] += torch.stack([(right & asked).sum(), asked.sum()])
        for place, number in enumerate(TASKS.values()):
            asked = kinds[:, 1:] == number
            self.seen[place] += torch.stack([(right & asked).sum(), asked.sum()])
        self.seen[5] += torch.stack([loss.detach(), torch.ones_like(loss)])

    def graph(self, length, kind):
        self.rate.fill_(0.0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(length, kind)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(length, kind)
        self.seen.zero_()
        return graph

    def train(self):
        steps, number, passed, started, curve = self.args.steps, 0, 0.0, time.time(), []
        for length, kind, share in STAGES:
            graph = self.graph(length, kind)
            passed = round(passed + share, 6)
            end = round(steps * passed)
            while number < end and time.time() - started < self.args.seconds * passed:
                # Where time is short, the rate falls with the time instead.
                done = max(number / steps, (time.time() - started) / self.args.seconds)
                warm = min(1.0, number / 300)
                self.rate.fill_(self.args.rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1, done))) / 2))
                graph.replay()
                number += 1
                if number % EVERY == 0:
                    right, asked = self.seen.T.tolist()
                    self.seen.zero_()
                    row = [number, round(time.time() - started, 1), length, kind, round(right[5] / asked[5], 5)]
                    curve.append(row + [round(right[i] / max(1, asked[i]), 5) for i in range(5)])
                    if number % (EVERY * 5) == 0:
                        print(self.args.family, *curve[-1], flush=True)
                if number % 500 == 0:
                    fresh = questions.Streams(POOL, LONGEST, self.args.seed * 1000 + number // 500 + 1, "cuda")
                    self.pool.tokens.copy_(fresh.tokens)
                    self.pool.kinds.copy_(fresh.kinds)
            del graph
        torch.cuda.synchronize()
        return number, time.time() - started, curve


@torch.no_grad()
def accuracy(model, streams, at_once=256):
    """Per question, and per place in the stream or distance: how many of how many were answered right."""
    wrong, end = [], streams.kinds.shape[1]
    for tokens in streams.tokens.split(at_once):
        wrong.append(model(tokens, use_cache=False).logits[:, :-1].argmax(-1) != tokens[:, 1:])
    wrong = F.pad(torch.cat(wrong), (1, 0))
    table = {}
    for task, number in TASKS.items():
        asked = streams.kinds == number
        if task == "echo":
            # All three, asked for at the first of them.
            first = asked & (streams.tokens.roll(1, 1) == number) & (streams.kinds.roll(1, 1) == 0)
            first[:, -2:] = False
            missed = wrong | wrong.roll(-1, 1) | wrong.roll(-2, 1)
        else:
            first, missed = asked, wrong
        place = torch.arange(end, device=first.device).expand_as(first)
        parts = {"all": first}
        parts |= {f"place {a}-{b - 1}": first & (place >= a) & (place < b) for a, b in ((0, 64), (64, 128), (128, 256))}
        if task == "sum":
            bounds, what = ((0, 4), (4, 7), (7, 9)), "digits"
        else:
            bounds, what = ((0, 32), (32, 96), (96, 256)), "back"
        if task != "echo":
            far = streams.far
            parts |= {f"{what} {a}-{b - 1}": first & (far >= a) & (far < b) for a, b in bounds}
        counted = {part: (int((chosen & ~missed).sum()), int(chosen.sum())) for part, chosen in parts.items()}
        table[task] = {part: {"right": round(r / n, 4), "of": n} for part, (r, n) in counted.items() if n}
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=families.FAMILIES)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="else what the family needs")
    parser.add_argument("--seconds", type=float, default=3600, help="ends earlier, with the same schedule")
    parser.add_argument("--tokens", type=int, default=8192, help="in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--from", dest="begin", type=pathlib.Path, help="a folder with models to go on from, not new numbers")
    args = parser.parse_args()
    if args.begin and args.family == "deepseek":
        parser.error("--from: the module of deepseek is not among what is loaded; train it anew")
    args.steps = args.steps or families.STEPS[args.family]
    torch.backends.cuda.matmul.allow_tf32 = True
    scans.use()
    folder = args.folder / args.family
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    steps, seconds, curve = trainer.train()
    net = trainer.net
    with open(args.folder / f"{args.family}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        last = "doubted" if trainer.doubt else "module"
        writer.writerow(["step", "seconds", "length", "numbers", "loss", *TASKS, last])
        writer.writerows(curve)
    families.save(net, folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    # A seed that training never used.
    streams = questions.Streams(2048, LONGEST, 10**9 + args.seed, "cuda")
    weights = folder / "model.safetensors"
    card = {
        "family": args.family,
        "parameters": sum(p.numel() for p in net.parameters()),
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "seed": args.seed,
        **({"from": cards.checked(args.begin / args.family)["sha256"]} if args.begin else {}),
        "steps": steps,
        "steps_planned": args.steps,
        "tokens_in_a_step": args.tokens,
        "rate": args.rate,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "accuracy": {
            kind: accuracy(families.load(folder, kind).cuda(), streams) for kind in ("float32", "bfloat16")
        },
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    for kind, table in card["accuracy"].items():
        print(args.family, kind, {task: table[task]["all"]["right"] for task in table}, steps, round(seconds), flush=True)


if __name__ == "__main__":
    main()
