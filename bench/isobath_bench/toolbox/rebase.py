"""A safe rebase of an image over 100 layers, in which one cluster in a hundred has changed, onto another overlay of
their base, in which as many have."""

import random
import shutil

from isobath_bench import report, rounds, tools

from . import directory, generate, measured, programs, settle

CASE = ("rebase",)
CLUSTER = 64 << 10


def trace(path, data, layers):
    """Who wrote what: the base everything, the others a part of it."""
    draw = random.Random(1)
    clusters = data // CLUSTER
    lines = [f"0 0 {data}"]
    for layer in range(1, layers + 1):
        for _ in range(max(clusters // 100 // layers, 1)):
            lines.append(f"{layer} {draw.randrange(clusters) * CLUSTER} {CLUSTER}")
    path.write_text("\n".join(lines) + "\n")


def run(count, _seconds):
    layers, gib = (10, 0.125) if tools.QUICK else (100, 4)
    work = directory("rebase")
    trace(work / "trace", int(gib * 0.9 * (1 << 30)) // CLUSTER * CLUSTER, layers)
    size = int(gib * (1 << 30))
    distribution = f"trace:{work / 'trace'}"
    active = generate(work / "chain", "--layers", layers + 2, "--size", size, "--distribution", distribution)
    base = work / "chain" / "layer-00000.qcow2"
    other = work / "other.qcow2"
    tools.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", other)
    draw = random.Random(2)
    data = size * 9 // 10 // CLUSTER
    writes = [f"write -q -P {n % 255 + 1} {draw.randrange(data) * CLUSTER} {CLUSTER}" for n in range(data // 100)]
    tools.run("qemu-io", other, input="\n".join(writes))
    shutil.copy(active, work / "active")

    def measure(_case, name):
        shutil.copy(work / "active", active)
        settle()
        return measured(programs()[name], "rebase", "-q", "-f", "qcow2", "-b", other, "-F", "qcow2", active)

    samples = rounds.by_case(count, [CASE], list(programs()), measure)
    shutil.rmtree(work)
    seconds = {name: samples.median((*CASE, name), "seconds") for name in programs()}
    ratio = report.ratio(seconds["qemu-img"], seconds["isobath"])
    return {
        "samples": samples.raw(),
        "tables": [],
        "goals": [
            report.limit(f"safe rebase over {layers} layers, 1 % changed: qemu-img ÷ isobath", ratio, at_least=20)
        ],
        "figures": [],
        "notes": [f"Rebase: isobath {seconds['isobath']:.3f} s, qemu-img {seconds['qemu-img']:.3f} s."],
    }
