"""What a container of a Kubernetes manifest is started with: its environment and its arguments, by the kubelet's rules.

`tools/test-deploy.sh` uses it, and runs the examples.
"""

import re


def expand(text, known):
    """Fills in `$(NAME)`, once: what was filled in is not looked at again, and an unknown name stays as it is.

    >>> expand("a $(X) $(Y) $X $(", {"X": "$(X)"})
    'a $(X) $(Y) $X $('
    >>> expand("$$(X) $$$(X) $$", {"X": "1"})
    '$(X) $1 $'
    """

    def fill(found):
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    return re.sub(r"\$(?:\$|\(([^)]*)\))", fill, text)


def environment(container, kept, fields):
    """Entry by entry: a `value` may name those above it; what comes from elsewhere is taken as it is. `kept` has what
    ConfigMaps and Secrets hold by kind and name, `fields` what the cluster knows of the pod.

    >>> kept = {("configMap", "c"): {"k": "$(IP)"}}
    >>> ip = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    >>> other = {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    >>> environment({"env": [{"name": "A", "value": "$(IP)"}, ip, {"name": "B", "value": "$(IP)"}, other]}, kept,
    ...     {"status.podIP": "10.0.0.5"})
    {'A': '$(IP)', 'IP': '10.0.0.5', 'B': '10.0.0.5', 'K': '$(IP)'}
    """
    if "envFrom" in container:
        raise ValueError("envFrom is not understood here")
    known = {}
    for entry in container.get("env", []):
        [(kind, source)] = entry.get("valueFrom", {"value": None}).items()
        if kind == "value":
            known[entry["name"]] = expand(entry.get("value", ""), known)
        elif kind == "fieldRef":
            known[entry["name"]] = fields[source["fieldPath"]]
        else:
            known[entry["name"]] = kept[kind.removesuffix("KeyRef"), source["name"]][source["key"]]
    return known


def arguments(container, known):
    """The whole command line, as far as the manifest says it.

    >>> arguments({"command": ["sh"], "args": ["--ip=$(IP)", "$(K)"]}, {"IP": "10.0.0.5", "K": "$(IP)"})
    ['sh', '--ip=10.0.0.5', '$(IP)']
    """
    return [expand(text, known) for text in container.get("command", []) + container.get("args", [])]
