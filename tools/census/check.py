"""Where a census contradicts itself, or misses what it is for."""

import re

TABLES = ("specs", "states", "quantisation", "backends", "architectures")


def problems(census: dict) -> list[str]:
    found = []
    for table in TABLES:
        rows = census[table]
        if not rows or len({it["name"] for it in rows}) != len(rows):
            found.append(f"{table}: no rows, or one twice")
        found += [f"{it['name']}: {problem}" for it in rows if (problem := of_row(it))]
    caches = {it["name"]: it for it in [*census["specs"], *census["states"]]}
    for it in census["architectures"]:
        parts = [caches.get(name) for name in [*it["specs"], *it["states"]]]
        problem = "it has a cache that is not in the census" if None in parts else of_architecture(it, parts)
        found += [f"{it['name']}: {problem}"] * bool(problem)
    return found


def of_row(it: dict) -> str | None:
    kept, theirs = it["kvferry"] != "not a cache", it.get("nixl", "")
    if it["kvferry"] not in ("described", "refused", "not a cache"):
        return f"'{it['kvferry']}' is nothing that kvferry makes of it"
    if it["kvferry"] != "described" and not it["why"]:
        return "it is not said why it is not described"
    if kept != (theirs in ("serves", "serves some", "refuses", "moves nothing", "as its language model")):
        return "it is not said what the engine's own connector does with it"
    # Whoever doubts it can look it up; what is said of an architecture follows from its layers.
    if bool(re.search(r"\.py:\d+$", it.get("nixl_source", ""))) != (kept and "kind" not in it):
        return "it is not said where that is to be seen"
    # What the census is for.
    return "the engine's own connector serves it" if it["kvferry"] == "refused" and theirs != "refuses" else None


def of_architecture(it: dict, parts: list[dict]) -> str | None:
    """An architecture is refused where one of its caches or states is, and its row says which; the engine's own
    connector serves no more of it than of the least of them."""
    theirs = it.get("nixl", "")
    refused = next((part for part in parts if part["kvferry"] == "refused"), None)
    if it["kvferry"] != ("refused" if refused else "described" if theirs else "not a cache"):
        return "its caches say otherwise"
    if refused and it["why"] != f"{refused['name']}: {refused['why']}":
        return "it is not said which of its caches is refused"
    keeps_none = theirs in ("", "as its language model")
    if (not parts) != keeps_none or (not it["layers"]) != keeps_none:
        return "its layers are missing"
    order = ("refuses", "serves some", "serves")
    least = next((word for word in order if any(part.get("nixl") == word for part in parts)), None)
    # Some back ends are refused whatever their caches are.
    if least and theirs not in (least, "refuses"):
        return "more of it is served than of its caches"
    return None
