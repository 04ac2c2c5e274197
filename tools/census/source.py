"""What vLLM's source says: classes, back ends, architectures, and the layers that these can have."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(find_spec("vllm").origin).parent

#: Where layers that keep a cache are defined.
SCOPE = (
    "vllm.model_executor.models",
    "vllm.models",
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.mla",
    "vllm.v1.attention.backends.mla.sparse_swa",
)
REGISTRY = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "several inputs",
    "_SPECULATIVE_DECODING_MODELS": "draft",
}
#: Whose language model is another architecture of this list.
BACKBONE = "init_vllm_registered_model"


@cache
def module(name: str) -> tuple[Path, ast.Module] | None:
    path = SOURCE.parent / Path(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file, ast.parse(file.read_text())
    return None


@cache
def classes(path: str) -> list[ast.ClassDef]:
    tree = ast.parse((SOURCE / path).read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def spec_classes() -> list[str]:
    """KVCacheSpec and all that derive from it."""
    found = ["KVCacheSpec"]
    for node in classes("v1/kv_cache_interface.py"):
        if any(isinstance(base, ast.Name) and base.id in found for base in node.bases):
            found.append(node.name)
    return found


def enum_values(node: ast.ClassDef) -> list[str]:
    return [
        target.id
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    ]


def quantisation_modes() -> list[str]:
    return next(
        enum_values(node)
        for node in classes("v1/kv_cache_interface.py")
        if node.name == "KVQuantMode"
    )


def members(enum: str) -> list[str]:
    found = classes("v1/attention/backends/registry.py")
    return next(enum_values(node) for node in found if node.name == enum)


def backend_names() -> dict[str, list[str]]:
    """What back ends call themselves, and the classes that do."""
    found: dict[str, list[str]] = {}
    for folder in ("v1/attention", "model_executor/layers/attention", "model_executor/models", "models"):
        for file in sorted((SOURCE / folder).rglob("*.py")):
            # Those of a prefill alone keep nothing.
            if "prefill" in file.parent.name:
                continue
            text = file.read_text()
            if "def get_name" not in text:
                continue
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and (name := own_name(node)) is not None:
                    place = file.relative_to(SOURCE).with_suffix("")
                    found.setdefault(name, []).append(".".join((*place.parts, node.name)))
    return found


def own_name(node: ast.ClassDef) -> str | None:
    if not node.name.endswith("Backend"):
        return None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "get_name":
            for part in ast.walk(item):
                if isinstance(part, ast.Return) and isinstance(part.value, ast.Constant):
                    return str(part.value.value)
    return None


def takes_connectors(place: str) -> bool:
    """Whether a back end's class says nothing else of connectors than that it works with them."""
    home, cls = place.rsplit(".", 1)
    path = f"{home.replace('.', '/')}.py"
    node = next((it for it in classes(path) if it.name == cls), None) if (SOURCE / path).is_file() else None
    for item in node.body if node is not None else ():
        if isinstance(item, ast.FunctionDef) and item.name == "supports_kv_connector":
            return any(
                isinstance(part, ast.Constant) and part.value is True for part in ast.walk(item)
            )
    return True


def architectures() -> list[tuple[str, str, str, str]]:
    """The list of each architecture, its name, and the module and class behind it."""
    found = module("vllm.model_executor.models.registry")
    assert found is not None
    listed = []
    for node in found[1].body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in REGISTRY:
            for name, (home, cls) in ast.literal_eval(node.value).items():
                if not home.startswith("vllm."):
                    home = f"vllm.model_executor.models.{home}"
                listed.append((REGISTRY[target.id], name, home, cls))
    return listed


class Layers:
    """Which layers an architecture can have: all that its class mentions, directly or not."""

    @staticmethod
    @cache
    def names(home: str) -> dict[str, list]:
        """What a module defines or imports, by name."""
        found = module(home)
        names: dict[str, list] = {}
        if found is None:
            return names

        def look(body: list[ast.stmt]) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.ImportFrom):
                    origin = imported(home, found[0], node)
                    for alias in node.names:
                        names.setdefault(alias.asname or alias.name, []).append((origin, alias.name))
                elif isinstance(node, ast.If):
                    look(node.body + node.orelse)
                elif isinstance(node, ast.Try):
                    look(node.body + [s for h in node.handlers for s in h.body] + node.orelse)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            names.setdefault(target.id, []).append(node)

        look(found[1].body)
        return names

    def reached(self, home: str, cls: str) -> tuple[dict[str, list[str]], list[str], bool]:
        seen, todo = set(), [(home, cls)]
        layers: dict[str, list[str]] = {}
        states: set[str] = set()
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            own, types, further = self.step(*place)
            layers |= own
            states |= types
            todo += further
        return layers, sorted(states), any(name == BACKBONE for _, name in seen)

    @classmethod
    @cache
    def step(cls, home: str, name: str) -> tuple[dict[str, list[str]], set[str], list]:
        """What a name is: a layer or not, and what else it mentions."""
        layers: dict[str, list[str]] = {}
        states: set[str] = set()
        further: list[tuple[str, str]] = []
        for found in cls.names(home).get(name, []):
            if isinstance(found, tuple):
                further += [found] if found[0].startswith(SCOPE) else []
                continue
            parts: list[ast.AST] = [found]
            if isinstance(found, ast.ClassDef):
                asked, types = asked_specs(found), state_types(found)
                states |= types
                if asked:
                    layers[found.name] = asked
                if asked or types:
                    # A layer's own code mentions other layers only to tell itself apart.
                    parts = list(found.bases)
            further += [it for part in parts for it in mentioned(home, part)]
        return layers, states, sorted(set(further))


def imported(home: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = home.split(".") if file.name == "__init__.py" else home.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def mentioned(home: str, node: ast.AST) -> list[tuple[str, str]]:
    found = []
    file = module(home)
    assert file is not None
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.append((home, part.id))
        elif isinstance(part, ast.ImportFrom):
            origin = imported(home, file[0], part)
            if origin.startswith(SCOPE):
                found += [(origin, alias.name) for alias in part.names]
    return found


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return item
    return None


def asked_specs(node: ast.ClassDef) -> list[str]:
    """The spec classes that a layer's `get_kv_cache_spec` makes or passes on."""
    found = method(node, "get_kv_cache_spec")
    if found is None:
        return []
    calls = (part.func for part in ast.walk(found) if isinstance(part, ast.Call))
    made = {call.id for call in calls if isinstance(call, ast.Name) and call.id.endswith("Spec")}
    return sorted(made)


def state_types(node: ast.ClassDef) -> set[str]:
    found = method(node, "mamba_type")
    if found is None:
        return set()
    return {
        part.attr
        for part in ast.walk(found)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "MambaAttentionBackendEnum"
    }
