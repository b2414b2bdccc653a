"""Figure 7: other formats' chains in QEMU."""

import contextlib
import json
import random
import shutil

from isobath_bench import servers, tools
from isobath_bench.depth import chains

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import compared
from . import passes

NAME = "formats"
TITLE = "Other formats"
SOURCE = "SVD, figure 7"

# The paper's raw data: MB/s of dd and RSS in MB, the guest's 4,096 in it, by snapshots. What it calls VHDX is in arrays
# named qcow2.
PAPER_LENGTHS = [1, 50, 100, 200, 300]
PAPER_SPEED = {"VMDK": [1900, 901, 511, 222, 139], "VHDX": [1800, 1300, 819, 520, 366]}
PAPER_RSS = {"VMDK": [4154, 4164, 4254, 4305, 4324], "VHDX": [4161, 4223, 4271, 4406, 4426]}
GUEST = 4096
CLUSTER = 65536
# Formats of which QEMU makes chains, by our names; and all that are asked for.
CHAINED = {"VMDK in QEMU": "vmdk", "QED in QEMU": "qed"}
ASKED = ["vmdk", "vhdx", "qed", "vpc", "vdi", "parallels", "qcow2"]
QCOW2 = "qcow2 in QEMU"
REFUSALS = "refusals"


class Setting:
    def __init__(self, profile):
        self.size = profile.of(16 << 20, 256 << 20)
        self.seconds = profile.of(0.3, 2)


def setting(profile):
    return contextlib.nullcontext(Setting(profile))


def names():
    return [*CHAINED, QCOW2, passes.ISOBATH]


def points(profile):
    lengths = profile.of([1, 10], PAPER_LENGTHS)
    found = [Point((REFUSALS,), seconds=0.3, once=True)]
    return found + [Point((name, layers), seconds=profile.of(0.8, 5)) for layers in lengths for name in names()]


def measure(how, point, number):
    del number
    if point.key == (REFUSALS,):
        return refusals()
    name, layers = point.key
    if name in CHAINED:
        active = make(CHAINED[name], layers, how.size)
    else:
        active = chains.make(layers, size=how.size)
    chains.warm(active)
    with serve(name, active) as server:
        passes.one_pass(server)
        return passes.dd(server, how.seconds) | {"rss": server.rss()}


def serve(name, active):
    if name == passes.ISOBATH:
        return servers.isobath(active, "--read-only")
    return servers.qemu_nbd(active, "--read-only", name=name, form=CHAINED.get(name, "qcow2"))


def refusals():
    """What QEMU says to a chain of each format; empty where it makes one."""
    found = {}
    for form in ASKED:
        base, overlay = (tools.WORK / f"try-{place}.{form}" for place in ("base", "overlay"))
        try:
            tools.run("qemu-img", "create", "-q", "-f", form, base, CLUSTER * 64)
            tools.run("qemu-img", "create", "-q", "-f", form, "-b", base.name, "-F", form, overlay)
            found[form] = ""
        except tools.Failed as error:
            found[form] = str(error).splitlines()[-1].split(": ", 2)[-1]
        finally:
            for path in (base, overlay):
                path.unlink(missing_ok=True)
    return {"refusals": found}


def make(form, layers, size):
    """The active layer of a chain of another format, each cluster of 90 % of the disk in a random layer; made unless it
    is there."""
    name = f"chain-{form}-{layers}-layers-{size >> 20}M"
    directory, done = tools.WORK / name, tools.WORK / f"{name}.done"
    files = [f"layer-{number:05}.{form}" for number in range(layers)]
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        choice = random.Random(1)
        owned = [[] for _ in files]
        for cluster in choice.sample(range(size // CLUSTER), size // CLUSTER * 9 // 10):
            owned[choice.randrange(layers)].append(cluster)
        for number, file in enumerate(files):
            below = ["-b", files[number - 1], "-F", form] if number else []
            # VMDK notes in an overlay what the layer below was when it was made, so layers are filled one by one;
            # with -u the chain below is not opened for each.
            tools.run("qemu-img", "create", "-q", "-u", "-f", form, *below, file, size, cwd=directory)
            options = {"driver": form, "file": {"driver": "file", "filename": file}, "backing": None}
            commands = "".join(
                f"write -q -P {number % 255 + 1} {cluster * CLUSTER} {CLUSTER}\n" for cluster in sorted(owned[number])
            )
            tools.run("qemu-io", "-d", "unmap", f"json:{json.dumps(options)}", input=commands, cwd=directory)
        done.touch()
    return directory / files[-1]


def section(results):
    lengths = sorted({key[1] for key in results.keys() if len(key) > 1})
    most, title = lengths[-1], "Other formats: dd and memory over the length of the chain"

    def curves(field, scale):
        medians = {name: [(layers, results.median((name, layers), field)) for layers in lengths] for name in names()}
        return {
            name: [(layers, None if value is None else value * scale) for layers, value in points]
            for name, points in medians.items()
        }

    with figures.drawn(results, "fig7", title, columns=2, rows=2) as (_, axes):
        paper_rss = {name: [value - GUEST for value in values] for name, values in PAPER_RSS.items()}
        panels = [(curves("bytes_per_second", 1e-6), "here", "MB/s"), (curves("rss", 1e-6), "here", "RSS, MB")]
        for values, label in ((PAPER_SPEED, "MB/s"), (paper_rss, "RSS beyond the guest's, MB")):
            panels.append(
                ({name: list(zip(PAPER_LENGTHS, each, strict=True)) for name, each in values.items()}, "paper", label)
            )
        for each, (series, heading, label) in zip(axes, panels, strict=True):
            figures.plot_lines(each, series)
            figures.decorate(each, "layers", label)
            each.set_title(heading)
    rows = [
        [
            name,
            f"{layers:,}",
            results.text((name, layers), "bytes_per_second", factor=1e-6),
            results.ratio_text((name, layers), (name, 1), "bytes_per_second"),
            results.text((name, layers), "rss", "{:,.1f}", 1e-6),
        ]
        for name in names()
        for layers in lengths
    ]
    paper_left = {name: values[-1] / values[0] for name, values in PAPER_SPEED.items()}
    verdicts = [
        compared(
            results,
            f"{passes.ISOBATH}: dd at {most} layers ÷ 1 (paper: {name} at 300)",
            part,
            (passes.ISOBATH, most),
            (passes.ISOBATH, 1),
            "bytes_per_second",
            why="1 MiB of clusters that belong to random layers is 16 reads of 16 files",
        )
        for name, part in paper_left.items()
    ]
    verdicts += [
        compared(
            results,
            f"{name}: dd at {most} layers ÷ 1 (paper: VMDK at 300)",
            paper_left["VMDK"],
            (name, most),
            (name, 1),
            "bytes_per_second",
            better="equal",
            check=True,
            why=(
                "there is no guest here whose part of the time does not grow, and QEMU's block layer, the same for all"
                " formats, asks for every request of a layer whether all below it are there (`bdrv_is_inserted`)"
            ),
        )
        for name in CHAINED
    ]
    said = next(iter(results.samples((REFUSALS,))), {"refusals": {}})["refusals"]
    refused = "; ".join(f'{form}: "{text}"' for form, text in said.items() if text)
    return Section(
        paper=(
            "Chains of VMDK and VHDX lose throughput and take memory with their length as those of qcow2 do. (The"
            ' authors\' notebook names the arrays of the curve "VHDX" after qcow2.)'
        ),
        ours=(
            "Sequential reads of 1 MiB over NBD from the page cache after a first pass, a disk of 256 MiB of which 90"
            " % is in clusters of 64 KiB that belong to random layers. QEMU"
            f" {servers.qemu_name('qemu-img').removeprefix('QEMU ')} makes no chains of some formats ({refused}), VHDX"
            " among them: QED stands in for it. Isobath reads chains of qcow2 and raw images only; its chain is here"
            " without an index."
        ),
        parts=[
            figures.saved(results, "fig7", title),
            Table("Figure 7", ["chain", "layers", "dd, MB/s", "of one layer's", "RSS, MB"], rows),
        ],
        verdicts=verdicts,
    )
