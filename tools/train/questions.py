"""What the tiny models are asked: streams of pairs, digits and marks, with questions in between.

| question | answer | what has to be kept for it |
|---|---|---|
| recall | the value that stood behind this key, anywhere before | keys and values of attention, or a delta rule's state |
| sum | all digits so far, modulo 8 | a recurrent state, or attention that counts |
| latest | the last mark | a state, or a window |
| echo | the three tokens before the question | a convolution's state, or a window |
"""

import torch

START, END, PAD = 0, 5, 6
RECALL, SUM, LATEST, ECHO = 1, 2, 3, 4
TASKS = {"recall": RECALL, "sum": SUM, "latest": LATEST, "echo": ECHO}
DIGITS, MARKS, KEYS, VALUES, VOCABULARY = 8, 16, 32, 80, 128
MOST_KEYS = 48
# So many digits at most stand between two questions for their sum: an answer says what was before it.
MOST_DIGITS = 8
# How often something comes next: pair, digit, mark, recall, latest, echo. The rest are sums, of which half of the
# streams have few.
SHARES = (0.22, 0.22, 0.07, 0.15, 0.07, 0.10)


class Streams:
    """`tokens` of many streams. Where `kinds` is not 0, a token is an answer to a question of that kind; `far` says
    how many tokens back the value or the mark was last seen, or how many digits have come since the last sum was given."""

    def __init__(self, count, length, seed, device="cpu"):
        self.generator = torch.Generator(device).manual_seed(seed)
        # Room behind the end: an item is written with four tokens always.
        shape = (count, length + 4)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.kinds = torch.zeros(shape, dtype=torch.long, device=device)
        self.far = torch.zeros(shape, dtype=torch.long, device=device)
        self._write(count, length, device)
        self.tokens, self.kinds, self.far = (x[:, :length] for x in (self.tokens, self.kinds, self.far))

    def _draw(self, count):
        return torch.rand(count, generator=self.generator, device=self.tokens.device)

    def _below(self, limit):
        # Rounded, the product may be the limit itself.
        return torch.minimum((self._draw(len(limit)) * limit).long(), limit - 1).clamp(min=0)

    def _write(self, count, length, device):
        zeros = lambda *shape: torch.zeros(count, *shape, dtype=torch.long, device=device)
        row = torch.arange(count, device=device)
        keys = torch.rand(count, MOST_KEYS, generator=self.generator, device=device).argsort(1) + KEYS
        values, placed = zeros(MOST_KEYS), zeros(MOST_KEYS)
        known, total, digits, mark, marked = zeros(), zeros(), zeros(), zeros(), zeros()
        few = self._draw(count) < 0.5
        at = zeros() + 1  # behind START
        edges = torch.tensor(SHARES, device=device).cumsum(0)
        while at.min() < length:
            draw = torch.where(few, self._draw(count) * 0.87, self._draw(count))
            item = torch.bucketize(draw, edges)  # 0 to 5 as in SHARES, 6 is a sum
            # What cannot be asked yet, or has no room any more, becomes a pair or a digit or a sum.
            item = torch.where((item == 3) & (known == 0) | (item == 4) & (mark == 0), 0, item)
            item = torch.where((item == 0) & (known == MOST_KEYS), 1, item)
            item = torch.where((item == 5) & (at < 4), 1, item)
            item = torch.where((item == 6) & (digits == 0), 1, item)
            item = torch.where((item == 1) & (digits == MOST_DIGITS), 6, item)

            digit = self._below(zeros() + 8)
            new_mark = self._below(zeros() + KEYS - MARKS) + MARKS
            new_value = self._below(zeros() + VOCABULARY - VALUES) + VALUES
            which = self._below(known)
            free = known.clamp(max=MOST_KEYS - 1)
            before = [self.tokens[row, (at - back).clamp(min=0)] for back in (3, 2, 1)]
            nothing = zeros()
            choices = torch.stack([
                torch.stack([keys[row, free], new_value, nothing, nothing]),
                torch.stack([DIGITS + digit, nothing, nothing, nothing]),
                torch.stack([new_mark, nothing, nothing, nothing]),
                torch.stack([nothing + RECALL, keys[row, which], values[row, which], nothing]),
                torch.stack([nothing + LATEST, mark, nothing, nothing]),
                torch.stack([nothing + ECHO, *before]),
                torch.stack([nothing + SUM, DIGITS + total, nothing, nothing]),
            ])  # fmt: skip
            tokens = choices[item, :, row]
            sizes = torch.tensor([2, 1, 1, 3, 2, 4, 2], device=device)[item]
            kind = torch.tensor([0, 0, 0, RECALL, LATEST, ECHO, SUM], device=device)[item]
            first = torch.tensor([9, 9, 9, 2, 1, 1, 1], device=device)[item]
            far = torch.where(item == 3, at + 2 - placed[row, which], 0)
            far = torch.where(item == 4, at + 1 - marked, far)
            far = torch.where(item == 6, digits, far)
            for step in range(4):
                place = (at + step).clamp(max=length + 3)
                answer = (step >= first) & (step < sizes)
                self.tokens[row, place] = tokens[:, step]
                self.kinds[row, place] = torch.where(answer, kind, 0)
                self.far[row, place] = far

            pair = item == 0
            values[row, free] = torch.where(pair, new_value, values[row, free])
            placed[row, free] = torch.where(pair, at + 1, placed[row, free])
            # A question says it once more.
            placed[row, which] = torch.where(item == 3, at + 2, placed[row, which])
            known = known + pair
            total = torch.where(item == 1, (total + digit) % 8, total)
            digits = torch.where(item == 1, digits + 1, torch.where(item == 6, 0, digits))
            marked = torch.where(item == 2, at, marked)
            mark = torch.where(item == 2, new_mark, mark)
            at = (at + sizes).clamp(max=length)


def prompts(task, count, length, seed):
    """`count` prompts of about `length` tokens that end in a question of this kind, each with its answer."""
    streams = Streams(count * 2, length + 8, seed)
    made = []
    for tokens, kinds in zip(streams.tokens.tolist(), streams.kinds.tolist(), strict=True):
        size = 3 if task == "echo" else 1
        ends = [
            end
            for end in range(4, length + 1)
            if all(kind == TASKS[task] for kind in kinds[end : end + size]) and kinds[end - 1] != TASKS[task]
        ]
        if ends and len(made) < count:
            made.append((tokens[: ends[-1]], tokens[ends[-1] : ends[-1] + size]))
    return made
