"""When each alert of `deploy/alerts.yaml` is raised, and when not. `tools/test-deploy.sh` runs it.

promtool would be the judge, but is no package that can be installed here. So the few forms that the rules have are
worked out below, on a sample a minute; anything else is an error. Prometheus also extrapolates to the ends of a window:
the cases keep away from limits where that matters.
"""

import operator
import re
import sys
from datetime import timedelta
from pathlib import Path

import promql_parser as promql
import yaml

HOUR = 60
A = (("engine", "0"), ("instance", "a"))


def failed(reason):
    return (("outcome", "failed"), ("reason", reason), *A)


def every(minutes, until):
    """A counter that grows by one every so many minutes, up to a minute."""
    return lambda now: min(now, until) // minutes


def once(now):
    return int(now >= 30)


def often(now):
    return 10 * min(now, 2 * HOUR)


#: alert, counter, labels, how it grows, whether the alert is raised within ten hours
CASES = [
    ("KvferryBytesDiffer", "loads", failed("mismatch"), once, True),
    ("KvferryBytesDiffer", "loads", failed("peer_misbehaved"), once, True),
    ("KvferryBytesDiffer", "loads", failed("deadline"), often, False),
    ("KvferryLoadsFail", "loads", failed("deadline"), often, True),
    ("KvferryLoadsFail", "loads", failed("deadline"), once, False),
    ("KvferryLoadsFail", "loads", (("outcome", "done"), ("reason", ""), *A), often, False),
    ("KvferryLeasesExpire", "leases_expired", A, often, True),
    ("KvferryLeasesExpire", "leases_expired", A, once, False),
    ("KvferryHoldsLost", "holds_lost", A, often, True),
    ("KvferryHoldsLost", "holds_lost", A, once, False),
    # Of ten a minute that are offered.
    ("KvferryPromptsRecomputed", "prompts_recomputed", (("reason", "params"), *A), often, True),
    ("KvferryPromptsRecomputed", "prompts_recomputed", (("reason", "params"), *A), every(2, 2 * HOUR), False),
    ("KvferryPromptsRecomputed", "prompts_recomputed", (("reason", "params"), *A), once, False),
    ("KvferryTablesChanged", "confirmations_not_granted", A, once, True),
    ("KvferryTablesChanged", "confirmations_not_granted", A, lambda now: 7, False),
    ("KvferryPeersRefused", "refusals", A, once, True),
    ("KvferryPeersRefused", "refusals", A, lambda now: 7, False),
    ("KvferryStrangers", "connections_turned_away", A, often, True),
    ("KvferryStrangers", "connections_turned_away", A, every(1, HOUR), False),
    ("KvferryDataStrangers", "data_connections_turned_away", A, often, True),
    ("KvferryDataStrangers", "data_connections_turned_away", A, every(1, HOUR), False),
    ("KvferryProtocolBroken", "connections_misbehaved", A, once, True),
    ("KvferryProtocolBroken", "connections_misbehaved", A, lambda now: 7, False),
    # With an audit in a hundred requests, half an hour may pass between two.
    ("KvferryAuditsUnable", "audits_unable", A, every(30, 5 * HOUR), True),
    ("KvferryAuditsUnable", "audits_unable", A, once, False),
    ("KvferryAuditsUnable", "audits_unable", A, every(1, 50), False),
    ("KvferryAuditsUnable", "audits_matched", A, often, False),
    ("KvferryLoadsUnconfirmed", "loads_unconfirmed", A, every(30, 9 * HOUR), True),
    ("KvferryLoadsUnconfirmed", "loads_unconfirmed", A, every(1, 4 * HOUR), False),
    ("KvferryStockUnreachable", "stock_unreachable", A, every(5, 40), True),
    ("KvferryStockUnreachable", "stock_unreachable", A, once, False),
]
COMPARE = {">": operator.gt, "<": operator.lt}


def value(expression, series, now):
    """What an expression is at a minute: a number for each set of labels."""
    if isinstance(expression, promql.BinaryExpr) and isinstance(expression.rhs, promql.NumberLiteral):
        holds, limit = COMPARE[str(expression.op)], expression.rhs.val
        return {at: n for at, n in value(expression.lhs, series, now).items() if holds(n, limit)}
    if isinstance(expression, promql.BinaryExpr) and str(expression.op) == "/":
        parts, wholes = (value(side, series, now) for side in (expression.lhs, expression.rhs))
        return {at: n / wholes[at] for at, n in parts.items() if wholes.get(at)}
    if isinstance(expression, promql.AggregateExpr) and str(expression.op) == "sum":
        if expression.modifier is None or "By" not in str(expression.modifier.type):
            raise ValueError("a sum must say by what")
        sums = {}
        for labels, n in value(expression.expr, series, now).items():
            key = tuple((name, said) for name, said in labels if name in expression.modifier.labels)
            sums[key] = sums.get(key, 0) + n
        return sums
    if isinstance(expression, promql.Call) and expression.func.name in ("rate", "increase"):
        [matrix] = expression.args
        minutes = int(matrix.range / timedelta(minutes=1))
        # No counter here goes back.
        grown = {
            labels: grows(now) - grows(max(0, now - minutes + 1))
            for (name, labels), grows in series.items()
            if name == matrix.vector_selector.name and chosen(matrix.vector_selector, dict(labels))
        }
        seconds = minutes * 60 if expression.func.name == "rate" else 1
        return {labels: n / seconds for labels, n in grown.items()}
    raise ValueError(f"not understood here: {expression.prettify()}")


def chosen(selector, labels):
    for matcher in selector.matchers.matchers:
        said, kind = labels.get(matcher.name, ""), str(matcher.op).removeprefix("MatchOp.")
        if kind not in ("Equal", "Re"):
            raise ValueError(f"not understood here: {kind}")
        if not (said == matcher.value if kind == "Equal" else re.fullmatch(matcher.value, said)):
            return False
    return True


def raised(rule, series):
    """Whether the alert is raised, for which labels."""
    known = {"m": 1, "h": HOUR}
    [count, unit] = re.fullmatch(r"(\d+)([mh])", rule.get("for", "0m")).groups()
    expression, since, found = promql.parse(rule["expr"]), {}, set()
    for now in range(10 * HOUR):
        true = value(expression, series, now)
        since = {labels: since.get(labels, now) for labels in true}
        found |= {labels for labels, began in since.items() if now - began >= int(count) * known[unit]}
    return found


[group] = yaml.safe_load(Path("deploy/alerts.yaml").read_text())["groups"]
rules = {rule["alert"]: rule for rule in group["rules"]}
problems = []
for alert, counter, labels, grows, expected in CASES:
    offered = {("vllm:kvferry_prompts_offered_total", A): often}
    found = raised(rules[alert], {(f"vllm:kvferry_{counter}_total", labels): grows} | offered)
    if bool(found) != expected or not all(dict(labels).get("instance") == "a" for labels in found):
        problems.append(f"{alert}: raised for {sorted(found) or 'nothing'} with {counter} {labels}")
for alert in rules:
    if {expected for name, *_, expected in CASES if name == alert} != {True, False}:
        problems.append(f"{alert}: needs a case in which it is raised, and one in which it is not")
print("\n".join(problems) or f"deploy: {len(rules)} alerts, {len(CASES)} cases, 0 problems")
sys.exit(bool(problems))
