"""What a soak's samples say."""

import collections

AUDITS = ("matched", "mismatched", "unable")
#: Idle in the end, a server has no more of these than it had under load, but for what comes and goes.
MORE = {"threads": 3, "files": 8}
#: Seconds behind a start in which a server still grows.
GROWS = 20


def audits(samples):
    """Of all that were made: a server that was started again counts anew."""
    found = collections.Counter()
    for who in {who for line in samples for who in line["servers"]}:
        lives = [line["servers"][who]["audits"] for line in samples if "audits" in line["servers"].get(who, {})]
        for result in AUDITS:
            counts = [one[result] for one in lives if result in one]
            ends = [before for before, after in zip(counts, counts[1:]) if after < before]
            found[result] += sum(ends) + (counts[-1] if counts else 0)
    return dict(found)


def flat(samples, events):
    """By server: what it took when it had been up for a while, and in the end, without requests. Memory is said, and
    judged by
    who reads the plot: an allocator keeps what it has had."""
    starts, found = {}, {}
    for event in events:
        if event["what"].endswith(" is back"):
            starts[event["what"].split()[0]] = event["at"]
    for who, last in samples[-1]["servers"].items() if samples else ():
        after = [line for line in samples if who in line["servers"] and line["at"] > starts.get(who, 0) + GROWS]
        if len(after) > 1:
            found[who] = {
                "from": after[0]["at"],
                "to": samples[-1]["at"],
                "first": after[0]["servers"][who],
                "last": last,
            }
    return found


def verdict(run):
    """What is wrong."""
    wrong = []
    if run["answers"].get("wrong"):
        wrong.append(f"{run['answers']['wrong']} wrong answers")
    if not run["answers"].get("right"):
        wrong.append("no answer at all")
    if run["audits"].get("mismatched"):
        wrong.append(f"{run['audits']['mismatched']} audits found a difference")
    if not run["audits"].get("matched"):
        wrong.append("nothing was audited: nothing was handed over")
    for who, one in run["flat"].items():
        if one["last"].get("blocks"):
            wrong.append(f"{who} holds {one['last']['blocks']} blocks")
        for what, most in MORE.items():
            if one["last"][what] > one["first"][what] + most:
                wrong.append(f"{who} has {one['last'][what]} {what}, and had {one['first'][what]}")
    return wrong
