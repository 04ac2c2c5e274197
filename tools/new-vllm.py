"""What `tools/new-vllm.sh` looks at in an installed vLLM (`facts`), and the page about two of them (`page FOLDER`)."""

import ast
import hashlib
import inspect
import json
import re
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from census import nixl, rows, source

#: Functions that may write a cache: what they do to its bytes is not in their names, nor in any spec.
WRITERS = re.compile(r"cache|insert|store|save|quant|pack|compress|state", re.I)
FOLDERS = ("models", "model_executor/models", "model_executor/layers", "v1/attention", "utils")
TABLES = {
    "specs": ("Classes of caches", source.spec_classes, rows.spec),
    "states": ("Types of recurrent states", lambda: source.members("MambaAttentionBackendEnum"), rows.state),
    "quantisation": ("Quantisation modes", source.quantisation_modes, rows.quantised),
    "backends": ("Attention back ends", lambda: sorted(source.backend_names()), None),
}


def facts() -> dict:
    from kvferry.vllm import FerryConnector, inside, versions
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1 import kv_cache_interface

    return {
        "vllm": version("vllm"),
        **{table: names() for table, (_, names, _) in TABLES.items()},
        "fields": {
            name: sorted(vars(getattr(kv_cache_interface, name)).get("__annotations__", ()))
            for name in source.spec_classes()
        },
        "architectures": sorted(name for _, name, _, _ in source.architectures()),
        "unknown": unknown(),
        "hooks": {name: hook(it) for name, it in vars(KVConnectorBase_V1).items() if name[0] != "_"},
        "ours": sorted(name for name in vars(FerryConnector) if name[0] != "_"),
        "differences": versions.differences(FerryConnector),
        "missing": inside.missing(),
        "touched": {f"{module} {name}": taken(module, name) for module, name in inside.names()},
        "writers": dict(writers()),
        "fingerprints": dict(fingerprints_()),
    }


def unknown() -> list[str]:
    """What the census's tables do not name."""
    found = []
    asked = [(row, (name,)) for _, names, row in TABLES.values() if row for name in names()]
    asked += [(rows.backend, it) for it in source.backend_names().items()]
    for row, it in asked:
        try:
            row(*it)
        except nixl.Unknown as error:
            found.append(str(error))
    return found


def hook(it: object) -> list[str]:
    """How vLLM calls a hook, and what it does where a connector does not override it."""
    function = getattr(it, "fget", None) or getattr(it, "__func__", it)
    if not inspect.isfunction(function):
        return ["", repr(it)]
    [made] = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body
    body = made.body[1:] if ast.get_docstring(made) is not None else made.body
    default = "; ".join(ast.unparse(line) for line in body).replace("\n", " ") or "nothing"
    if getattr(function, "__isabstractmethod__", False):
        default = "must be overridden"
    called = ", ".join(name for name in inspect.signature(function).parameters if name not in ("self", "cls"))
    return [called, re.sub(r"\s+", " ", default)[:160]]


def taken(module: str, name: str) -> str:
    """What something that is touched takes, if it can be called."""
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return str(inspect.signature(found)) if inspect.isroutine(found) else ""
    except (AttributeError, ImportError, ValueError, TypeError):
        return ""


def fingerprints_() -> list[tuple[str, str]]:
    """What the kernels write that Triton's interpreter can carry out (docs/fingerprints.md), and where."""
    sys.path.insert(0, str(Path(__file__).parent))
    import fingerprints

    return [
        (f"{it['writer']}, {it['cards']}: {it['state']} as {it['format']}", f"{it['bytes']} {it['where']}")
        for it in fingerprints.rows(None, "")
    ]


def writers() -> list[tuple[str, str]]:
    """A digest of each function that may write a cache: of its code, without comments."""
    found = []
    for folder in FOLDERS:
        for file in sorted((source.SOURCE / folder).rglob("*.py")):
            text = file.read_text()
            # A decorator names it: most files need not be parsed.
            if "triton" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and WRITERS.search(node.name):
                    if not any("triton" in ast.unparse(it) for it in node.decorator_list):
                        continue
                    if ast.get_docstring(node) is not None:
                        node.body = node.body[1:]
                    digest = hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]
                    found.append((f"{file.relative_to(source.SOURCE)} {node.name}", digest))
    return found


def page(folder: Path) -> tuple[str, bool]:
    """The page, and whether all of it works."""
    old, new = (json.loads((folder / f"{name}.json").read_text()) for name in ("old", "new"))
    text = f"# vLLM {new['vllm']} beside {old['vllm']}\n"
    if "over" in new["vllm"]:
        text += (
            "\nThere is no build of it for CPUs yet: this is its Python over the compiled parts of the other. What its "
            "own\ncompiled code writes into caches, and its model runner V2, are not seen here.\n"
        )
    text += "\n## What is new\n"
    for table, (title, _, _) in TABLES.items():
        text += changed(title, set(old[table]), set(new[table]))
    text += changed("Architectures", set(old["architectures"]), set(new["architectures"]))
    for name in old["fields"].keys() & new["fields"].keys():
        text += changed(f"Fields of `{name}`", set(old["fields"][name]), set(new["fields"][name]))
    text += changed("Hooks of a connector", set(old["hooks"]), set(new["hooks"]))

    text += "\n## What moved\n"
    text += listed(
        "Hooks that are called with other arguments, or do otherwise where they are not overridden",
        [f"`{it}`: {shown(old['hooks'][it])}; now {shown(new['hooks'][it])}" for it in moved("hooks", old, new)],
    )
    text += listed(
        "What the connector touches and that takes other arguments",
        [f"`{it}`: `{old['touched'][it]}`; now `{new['touched'][it]}`" for it in moved("touched", old, new)],
    )
    text += listed(
        "Triton kernels that may write caches, with other code: a page of the same name may have other bytes now. To "
        "be read",
        [f"`{it}`" for it in moved("writers", old, new)],
    )
    text += listed(
        "Kernels that write other bytes for the same input, or elsewhere (docs/fingerprints.md has all that ran)",
        [
            f"{it}: `{old['fingerprints'][it]}`; now `{new['fingerprints'][it]}`"
            for it in moved("fingerprints", old, new)
        ],
    )

    text += "\n## What must be decided\n"
    text += listed("Not in kvferry's tables, and refused by name until it is", new["unknown"])
    text += listed("Hooks that are not those that the connector knows: an engine does not start", new["differences"])
    text += listed("What the connector touches and that is not where it was", [f"`{it}`" for it in new["missing"]])
    left = {it: "" if it in old["hooks"] else " (new)" for it in sorted(new["hooks"].keys() - set(new["ours"]))}
    text += listed(
        "Hooks that the connector leaves as they are",
        [f"`{it}`{word}: {shown(new['hooks'][it])}" for it, word in left.items()],
    )
    text += "\n## What ran\n"
    rules = ran(folder / "rules.xml", "Page rules (`tests/vllm`)")
    pairs = ran(folder / "pairs.xml", "Pairs of engines (`tools/test-versions.sh`)")
    works = not (new["differences"] or new["missing"]) and rules[1] and pairs[1]
    return text + rules[0] + pairs[0], works


def moved(table: str, old: dict, new: dict) -> list[str]:
    """What is in both, and not the same."""
    before, after = old[table], new[table]
    return [it for it in sorted(before.keys() & after.keys()) if before[it] and before[it] != after[it]]


def shown(told: list[str]) -> str:
    return f"`({told[0]})`, `{told[1]}`"


def changed(title: str, before: set[str], after: set[str]) -> str:
    if before == after:
        return ""
    parts = [
        f"{word} {', '.join(f'`{it}`' for it in sorted(them))}"
        for word, them in (("new", after - before), ("gone", before - after))
        if them
    ]
    return f"- {title}: {'; '.join(parts)}\n"


def listed(title: str, items: list[str]) -> str:
    return f"\n{title}:" + (" nothing.\n" if not items else "\n" + "".join(f"- {it}\n" for it in items))


def ran(results: Path, what: str) -> tuple[str, bool]:
    if not results.exists():
        return f"\n{what}: **could not run**.\n", False
    cases = list(ElementTree.parse(results).iter("testcase"))
    wrong = [(case, it) for case in cases for it in case if it.tag in ("failure", "error")]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    title = f"{what}: {len(cases) - len(wrong) - skipped} of {len(cases)} as they should be, in {seconds:.0f} s"
    names = [f"`{case.get('name')}`: {(it.get('message') or it.tag).splitlines()[0][:200]}" for case, it in wrong]
    return listed(f"{title}. Failed", names), bool(cases) and not wrong


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        print(json.dumps(facts()))
    else:
        text, works = page(Path(sys.argv[2]))
        print(text, end="")
        sys.exit(not works)
