"""The weights of `models/tiny`, and what their cards say of them."""

import hashlib
import json


class Spoilt(Exception):
    """A file is not the one that was trained."""


def checked(folder):
    """The card of a model whose weights are those that it describes."""
    for name in ("card.json", "config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise Spoilt(f"{folder / name} is missing: `git checkout` brings it back")
    card = json.loads((folder / "card.json").read_text())
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != card["sha256"]:
        raise Spoilt(
            f"{folder / 'model.safetensors'} was changed: its sha256 is {found}, and card.json says {card['sha256']}; "
            f"`git checkout` brings the trained weights back"
        )
    return card
