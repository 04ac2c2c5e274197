"""Asks the committed models on the CPU, with transformers' own code and caches: `check.py models/tiny [FAMILY …]`."""

import pathlib
import sys

import cards
import families
import questions
import torch

COUNT, LENGTH, SEED = 24, 200, 7


def main():
    root = pathlib.Path(sys.argv[1])
    for family in sys.argv[2:] or sorted(folder.name for folder in root.iterdir()):
        try:
            cards.checked(root / family)
        except cards.Spoilt as error:
            sys.exit(f"error: {error}")
        model = families.load(root / family, "float32")
        right = {}
        for task in questions.TASKS:
            asked = questions.prompts(task, COUNT, LENGTH, SEED)
            right[task] = f"{sum(answers(model, *one) for one in asked)}/{len(asked)}"
        print(family, right, flush=True)


@torch.no_grad()
def answers(model, prompt, wanted):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=len(wanted), do_sample=False)
    return out[0, len(prompt) :].tolist() == wanted


if __name__ == "__main__":
    main()
