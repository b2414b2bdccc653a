"""Results: kept raw, printed as ratios."""

import json
import os
import platform
import statistics
import time
from pathlib import Path

from . import tools

RESULTS = Path(__file__).resolve().parents[1] / "results"


def machine():
    """What the figures were measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len([line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor")]),
        "kernel": platform.release(),
        "isobath": tools.version(tools.ISOBATH, "--version"),
        "qemu": tools.version("qemu-nbd", "--version"),
        "nbdkit": tools.version("nbdkit", "--version"),
        "fio": tools.version("fio", "--version"),
    }


def save(name, result):
    """Keeps a run's raw results."""
    RESULTS.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    content = {"scenario": name, "time": stamp, "machine": machine(), **result}
    (RESULTS / f"{name}-{stamp}.json").write_text(json.dumps(content, indent=1) + "\n")


def median(samples, key):
    return statistics.median(sample[key] for sample in samples)


def spread(samples, key):
    """Half the range between the extremes, as a part of the median."""
    values = [sample[key] for sample in samples]
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def table(name, description, result, output=None):
    """A run's tables in Markdown: figures by server, then the goals, then the pictures.

    `output` is the file that it goes to: pictures are named as seen from there.
    """
    about = machine()
    lines = [f"## {name}", "", (description or "").strip(), ""]
    lines += [
        (
            f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}; {about['qemu']}; {about['nbdkit']};"
            f" {about['fio']}."
        ),
        "",
    ]
    if "loads" in result:
        lines += ["| load | server | IOPS | MiB/s | CPU µs per request | spread of IOPS |", "|---|---|---|---|---|---|"]
    for load, servers in result.get("loads", {}).items():
        for server, samples in servers.items():
            lines.append(
                f"| {load} | {server} | {median(samples, 'iops'):,.0f} "
                f"| {median(samples, 'bytes_per_second') / 2**20:,.0f} "
                f"| {median(samples, 'cpu_us_per_request'):.2f} | ±{spread(samples, 'iops') * 100:.0f} % |"
            )
    for each in result.get("tables", []):
        lines += ["", f"### {each['title']}", ""] + ([each["text"], ""] if each.get("text") else [])
        lines += ["| " + " | ".join(each["columns"]) + " |", "|---" * len(each["columns"]) + "|"]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in each["rows"]]
    if result["goals"]:
        lines += ["", "| goal | to reach | measured | |", "|---|---|---|---|"]
    for goal in result["goals"]:
        verdict = {True: "reached", False: "**missed**", None: "**not measured**"}[goal["reached"]]
        measured = goal.get("measured") or f"{goal['ratio']:.2f}x"
        lines.append(f"| {goal['what']} | {goal['to_reach']} | {measured} | {verdict} |")
    for note in result.get("notes", []):
        lines += ["", note]
    base = Path(output).resolve().parent if output else Path.cwd()
    for figure in result.get("figures", []):
        path = os.path.relpath(RESULTS / figure["file"], base)
        lines += ["", f"![{figure['title']}]({path})"]
    return "\n".join(lines) + "\n"


def goal(loads, what, load, key, server, peer, *, at_least=None, at_most=None):
    """A ratio of medians against what is to be reached."""
    ratio = median(loads[load][server], key) / median(loads[load][peer], key)
    reached = ratio >= at_least if at_least is not None else ratio <= at_most
    to_reach = f"≥ {at_least}x" if at_least is not None else f"≤ {at_most}x"
    return {"what": what, "to_reach": to_reach, "ratio": ratio, "reached": reached}


def limit(what, value, *, at_least=None, at_most=None, unit="x", why=None, digits=None):
    """A figure against what is to be reached; `None` where it could not be measured."""
    to_reach = f"≥ {at_least} {unit}" if at_least is not None else f"≤ {at_most} {unit}"
    to_reach = to_reach.replace(" x", "x").strip()
    if value is None:
        return {"what": what, "to_reach": to_reach, "measured": why or "-", "reached": None}
    reached = value >= at_least if at_least is not None else value <= at_most
    digits = digits or (2 if abs(value) < 100 else 0)
    measured = f"{value:,.{digits}f} {unit}".replace(" x", "x").strip()
    return {"what": what, "to_reach": to_reach, "measured": measured, "value": value, "reached": reached}


def ratio(one, other):
    """`one` ÷ `other`; `None` where either was not measured."""
    return one / other if one is not None and other else None
