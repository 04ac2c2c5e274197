"""Queries, what servers are started with, and what the files under `deploy/` say about each other.

`tools/test-deploy.sh` runs it.
"""

import importlib
import json
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import kubelet
import promql_parser
import yaml

problems, queries = [], 0


def module(name):
    """One module of the package, without what the package itself imports: that takes a build."""
    for package in ("kvferry", "kvferry.vllm"):
        if package not in sys.modules:
            made = sys.modules[package] = types.ModuleType(package)
            made.__path__ = [str(Path("python", *package.split(".")))]
    return importlib.import_module(name)


options, plugin = module("kvferry.vllm.options"), module("kvferry.vllm.plugin")


def query(where, text):
    global queries
    queries += 1
    # Grafana's own variables, as it fills them in.
    text = text.replace("$__rate_interval", "1m").replace("$instance", ".*")
    try:
        promql_parser.parse(text)
    except Exception as error:  # whatever the parser raises
        problems.append(f"{where}: {error}: {text}")


for group in yaml.safe_load(Path("deploy/alerts.yaml").read_text())["groups"]:
    for rule in group["rules"]:
        query(rule["alert"], rule["expr"])
        problems += [
            f"{rule['alert']}: no {field}"
            for field in ("summary", "description")
            if not rule["annotations"].get(field)
        ]
shown = set()
for panel in json.loads(Path("deploy/grafana/kvferry.json").read_text())["panels"]:
    for target in panel["targets"]:
        query(panel["title"], target["expr"])
        names = set(re.findall(r"vllm:kvferry_\w+", target["expr"]))
        shown |= {re.sub("_(bucket|count|sum)$", "", name) for name in names}
        if panel["title"] == "What should stay at zero":
            alerts = Path("deploy/alerts.yaml").read_text()
            problems += [f"no alert asks for {name}, which should stay at zero" for name in names if name not in alerts]
# The page has every metric (tests/python/test_metrics.py). Two say only that somebody is there.
there = set(re.findall(r"`(vllm:kvferry_\w+)`", Path("docs/vllm.md").read_text()))
there -= {"vllm:kvferry_connections_total", "vllm:kvferry_heartbeats_total"}
problems += [f"the dashboard does not show {name}" for name in sorted(there - shown)]


def option(line, name):
    found = [word.removeprefix(f"--{name}=") for word in line if word.startswith(f"--{name}=")]
    if len(found) != 1:
        raise ValueError(f"--{name}=… is there {len(found)} times")
    return found[0]


def ends_gently(line, before, grace):
    """vLLM aborts what it computes unless it is given time, and whoever stops it must wait for longer."""
    time = int(option(line, "shutdown-timeout"))
    if not time:
        raise ValueError("with --shutdown-timeout=0 vLLM aborts")
    if before + time >= grace:
        raise ValueError(f"killed after {grace} s, but its end may take {before} + {time} s")


def connector(line, files):
    """The options that kvferry finds in `--kv-transfer-config`, held to what it accepts; `files` are those that the
    container has."""
    if line[0].startswith("-"):
        raise ValueError(f"the model must come first, not {line[0]}: the image runs `vllm serve`")
    given = json.loads(option(line, "kv-transfer-config"))
    unknown = given.keys() - {"kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy"}
    if unknown or given["kv_connector"] != plugin.NAME or given["kv_role"] not in ("kv_producer", "kv_consumer"):
        raise ValueError(f"--kv-transfer-config is {given}")
    policy = given.get("kv_load_failure_policy")
    if given["kv_role"] == "kv_consumer" and policy != "recompute":
        raise ValueError(f"kv_load_failure_policy is {policy}, and README.md recommends recompute on decode servers")
    extra = given["kv_connector_extra_config"]
    if missing := [path for path in extra.values() if str(path).startswith("/") and path not in files]:
        raise ValueError(f"the container has no {missing}")
    # Files of the container need not be on this machine.
    read = options.Options.read({name: "/dev/null" if value in files else value for name, value in extra.items()})
    read.resolved(read.host)
    if read.host in ("0.0.0.0", "::") and not read.advertise:
        raise ValueError("others are not told how to reach it: no 'advertise'")
    return read


def defined(script, known):
    """A shell takes what nobody has defined for nothing."""
    if missing := set(re.findall(r"\$\{?(\w+)", script)) - known.keys():
        raise ValueError(f"{sorted(missing)} are not in the environment of: {script}")


def kubernetes_server(pod, container, line, known):
    if "KVFERRY_KEY" not in known:
        raise ValueError("no KVFERRY_KEY")
    read = connector(line, ())
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if ports != {"http": int(option(line, "port")), "kvferry": read.port}:
        raise ValueError(f"it listens on other ports than {ports}")
    for probe in ("startupProbe", "readinessProbe"):
        if container[probe]["httpGet"] != {"path": "/health", "port": "http"}:
            raise ValueError(f"{probe} asks elsewhere")
    if pod["metadata"]["annotations"]["prometheus.io/port"] != str(ports["http"]):
        raise ValueError("Prometheus asks at another port")
    # In one script, whose variables the shell fills in: a pause until the router has noticed, and the drain.
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    defined(script, known)
    if f'kvferry drain "$POD_IP:{read.port}"' not in script or known["POD_IP"] != read.host:
        raise ValueError(f"drains another address than {read.host}:{read.port}: {script}")
    before = sum(int(re.search(rf"{word} (\d+)", script)[1]) for word in ("sleep", "--wait"))
    ends_gently(line, before, pod["spec"]["terminationGracePeriodSeconds"])


def reached(pod, line, policies):
    """The ports that others may reach are those that the server was told to listen on, and no others."""
    [policy] = policies
    chosen = policy["podSelector"]["matchExpressions"][0]["values"]
    if pod["metadata"]["labels"]["app"] not in chosen:
        raise ValueError(f"no policy for it: {chosen}")
    told = json.loads(option(line, "kv-transfer-config"))["kv_connector_extra_config"]
    first, last = map(int, told["data_ports"].split("-"))
    listens = {int(option(line, "port")), told["port"], *range(first, last + 1)}
    ports = [port for rule in policy["ingress"] for port in rule["ports"]]
    opened = {at for it in ports for at in range(it["port"], it.get("endPort", it["port"]) + 1)}
    if opened != listens:
        raise ValueError(f"listens on {sorted(listens)}, and {sorted(opened)} are open")


def kubernetes_router(line, known, pods):
    defined(line[-1], known)
    words = shlex.split(line[-1])
    port = words[words.index("--service-discovery-port") + 1]
    for side in ("prefill", "decode"):
        [key, value] = words[words.index(f"--{side}-selector") + 1].split("=")
        found = [pod for pod in pods.values() if pod["metadata"]["labels"].get(key) == value]
        if [f"--port={port}" in pod["spec"]["containers"][0]["args"] for pod in found] != [True]:
            raise ValueError(f"finds no {side} server at port {port}")


documents = list(yaml.safe_load_all(Path("deploy/kubernetes/kvferry.yaml").read_text()))
kept = {("configMap", d["metadata"]["name"]): d["data"] for d in documents if d["kind"] == "ConfigMap"}
kept["secret", "kvferry"] = {"key": "made by hand"}
fields = {"status.podIP": "10.0.0.5", "metadata.namespace": "serving"}
pods = {d["metadata"]["name"]: d["spec"]["template"] for d in documents if d["kind"] == "Deployment"}
servers = 0
for name, pod in pods.items():
    served = pod["spec"]["containers"][0]["image"].startswith("kvferry-vllm:")
    servers += served
    try:
        [container] = pod["spec"]["containers"]
        known = kubelet.environment(container, kept, fields)
        line = kubelet.arguments(container, known)
        for text in (*known.values(), *line):
            if "$(" in text:
                raise ValueError(f"Kubernetes does not fill this in: {text}")
        if served:
            kubernetes_server(pod, container, line, known)
            reached(pod, line, [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"])
        else:
            kubernetes_router(line, known, pods)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        problems.append(f"Kubernetes' {name}: {error!r}")
services = yaml.safe_load(Path("deploy/compose.yaml").read_text())["services"]
for name, service in services.items():
    if service["image"].startswith("kvferry-vllm:"):
        servers += 1
        try:
            connector(service["command"], [f"/run/secrets/{secret}" for secret in service["secrets"]])
            grace = int(re.fullmatch(r"(\d+)s", service.get("stop_grace_period", "10s"))[1])
            ends_gently(service["command"], 0, grace)
            port = option(service["command"], "port")
            asked = (
                (f"http://{name}:{port} ", services["router"]["command"][-1]),
                (f"http://127.0.0.1:{port}/health", service["healthcheck"]["test"][-1]),
                (f'"{name}:{port}"', Path("deploy/prometheus.yaml").read_text()),
            )
            for address, where in asked:
                if address not in where:
                    raise ValueError(f"nobody asks at {address} in: {where}")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            problems.append(f"compose's {name}: {error!r}")
if servers != 4:
    problems.append(f"{servers} servers in the manifests, not 4")

# Versions are told in one place each: these must be the same.
cargo = tomllib.loads(Path("Cargo.toml").read_text())["workspace"]
version = cargo["package"]["version"]
for name, told in cargo["dependencies"].items():
    if isinstance(told, dict) and "path" in told and told.get("version", version) != version:
        problems.append(f"Cargo.toml: {name} is asked for in version {told['version']}, not {version}")
tested = Path("tools/vllm-env.sh").read_text()
[vllm, nixl, router] = re.search(r"^vllm=(\S+) .*nixl=(\S+) router=(\S+)$", tested, re.M).groups()
if re.findall(r"^ARG NIXL=(\S+)$", Path("deploy/Containerfile").read_text(), re.M) != [nixl]:
    problems.append(f"deploy/Containerfile does not install NIXL {nixl}")
if f'VERSION: &str = "{nixl}"' not in Path("crates/kvferry-nixl/src/find.rs").read_text():
    problems.append(f"crates/kvferry-nixl/src/find.rs asks for another NIXL than {nixl}")
for path in Path("deploy").rglob("*"):
    if path.is_file():
        text = path.read_text()
        problems += [f"{path}: vLLM {v}, not {vllm}" for v in re.findall(r"(?:kvferry-vllm:|VLLM=v)([\d.]+)", text) if v != vllm]
        problems += [f"{path}: vllm-router {v}, not {router}" for v in re.findall(r"vllm-router==([\d.]+)", text) if v != router]
print("\n".join(problems) or f"deploy: {queries} queries, 0 problems")
sys.exit(bool(problems))
