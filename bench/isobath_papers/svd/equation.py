"""Equation 1: what a look-up costs by the length of the chain, calculated and measured."""

import contextlib
import mmap
import os
import random
import statistics
import time

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import slow
from ..verdict import Verdict, compared
from . import passes

NAME = "equation"
TITLE = "The cost of a look-up, calculated and measured"
SOURCE = "SVD, equation 1"

# The paper's constants in µs: memory, disk, all software and network, software.
PAPER = {"T_M": 0.1, "T_D": 80, "T_L": 5, "T_F": 1}
CONSTANTS = "constants"
HIT, MISS = "hit", "miss"
# T_F comes from the step between these.
STEP = (1, 10)
TABLE = 65536


class Setting:
    """A slow disk with chains on it, and the same chains in the work directory."""

    def __init__(self, profile, device):
        self.device = device
        self.size = profile.of(2 << 30, 16 << 30)
        self.reads = profile.of(100, 400)


@contextlib.contextmanager
def setting(profile):
    with slow.device("ssd", profile.of(256 << 20, 2 << 30)) as device:
        yield Setting(profile, device)


def points(profile):
    lengths = profile.of([1, 10], [1, 10, 50, 100, 300])
    return [Point((CONSTANTS,), seconds=1)] + [
        Point((name, layers), seconds=1 + layers * profile.of(0, 0.02))
        for layers in lengths for name in passes.names()
    ]  # fmt: skip


def measure(how, point, number):
    if point.key == (CONSTANTS,):
        return constants(how)
    name, layers = point.key
    active = passes.chain_at(how.device.directory, name, layers, how.size, fill=FILL)
    how.device.settle()
    first = passes.walks(how.size, number, fill=FILL)
    holes = random.Random(number).sample(passes.holes(how.size, FILL), how.reads)
    with passes.served(name, active, cache="none") as server:
        cold = passes.single_reads(server, first)
        warm = passes.single_reads(server, holes)
        sample = {MISS: statistics.median(cold), HIT: statistics.median(warm)}
        return sample | ({"lookup_us": passes.map_of(server)["lookup-median-ns"] / 1000} if passes.own(name) else {})


# Every layer has something in nearly every table, and most of the disk is nobody's.
FILL = "20%"


def constants(how):
    """Medians in µs of a table's read from the disk, and of a cached read through the kernel."""
    path = how.device.directory / "data"
    if not path.exists():
        tools.run("dd", "if=/dev/urandom", f"of={path}", "bs=1M", "count=32", "conv=fsync")
    return {"T_D": timed(path, os.O_DIRECT, TABLE), "T_L": timed(path, 0, passes.BLOCK)}


def timed(path, flags, length):
    buffer, file, took = mmap.mmap(-1, length), os.open(path, os.O_RDONLY | flags), []
    choice, size = random.Random(1), path.stat().st_size
    try:
        for _ in range(200):
            place = choice.randrange(size // length) * length
            began = time.perf_counter_ns()
            os.preadv(file, [buffer], place)
            took.append((time.perf_counter_ns() - began) / 1000)
    finally:
        os.close(file)
    return statistics.median(took)


def ours(results):
    """Our constants in µs, as far as they were measured."""
    qemu = passes.qemu()
    found = {name: results.median((CONSTANTS,), name) for name in ("T_D", "T_L")}
    hits = [results.median((qemu, layers), HIT) for layers in STEP]
    found["T_F"] = None if None in hits else max((hits[1] - hits[0]) / (STEP[1] - STEP[0]), 0.01)
    found["T_M"] = results.median((passes.INDEXED, 1), "lookup_us")
    return found if None not in found.values() else None


def equation(constants_of, layers, *, hit=0.0, miss=0.0, unallocated=0.0):
    """Equation 1 in µs: parts of the look-ups that are hits, misses and hits unallocated."""
    beyond = constants_of["T_D"] + constants_of["T_L"] + constants_of["T_F"]
    return (hit * constants_of["T_M"] + miss * beyond + unallocated * constants_of["T_F"]) * layers


def section(results):
    qemu, title = passes.qemu(), "A look-up's cost over the length of the chain"
    lengths = sorted({key[1] for key in results.keys() if len(key) > 1})
    own = ours(results)
    kinds = {
        HIT: ({"unallocated": 1.0}, {"hit": 1.0}, "tables in memory"),
        MISS: ({"miss": 1.0}, {"miss": 1.0}, "no table in memory"),
    }

    def measured(name, layers, kind):
        """What a request takes beyond what it takes with one layer and all in memory."""
        value, base = results.median((name, layers), kind), results.median((name, 1), HIT)
        return None if value is None or base is None else value - base

    def model(given, name, layers, kind):
        """QEMU looks into every layer; of isobath's there is one map."""
        if given is None:
            return None
        every, one, _ = kinds[kind]
        return equation(given, layers, **every) if name == qemu else equation(given, 1, **one)

    with figures.drawn(results, "eq1", title, columns=2) as (_, axes):
        for each, (kind, (_, _, heading)) in zip(axes, kinds.items(), strict=True):
            series = {
                name: [(layers, positive(measured(name, layers, kind))) for layers in lengths]
                for name in passes.names()
            }
            figures.plot_lines(each, series)
            for given, style, label in (
                (own, "--", "equation 1, our constants"),
                (PAPER, ":", "equation 1, the paper's"),
            ):
                if given:
                    each.plot(
                        lengths,
                        [model(given, qemu, layers, kind) for layers in lengths],
                        style,
                        color="#666666",
                        label=label,
                    )
            figures.decorate(each, "layers", "µs", log_x=True, log_y=True)
            each.set_title(heading)
    rows = [
        [
            heading,
            name,
            f"{layers:,}",
            *(
                text(value)
                for value in (
                    measured(name, layers, kind),
                    model(own, name, layers, kind),
                    model(PAPER, name, layers, kind),
                )
            ),
        ]
        for kind, (_, _, heading) in kinds.items()
        for name in passes.names()
        for layers in lengths
    ]
    constant_rows = [[name, text(own and own[name], 3), f"{PAPER[name]:g}", ABOUT[name]] for name in PAPER]
    most, verdicts = lengths[-1], []
    for kind, (_, _, heading) in kinds.items():
        value, by_model = measured(qemu, most, kind), model(own, qemu, most, kind)
        verdicts.append(
            Verdict(
                f"QEMU, {most} layers, {heading}: measured ÷ equation 1 with our constants",
                1.0,
                value / by_model if value is not None and by_model else None,
                better="equal",
                check=True,
                why=WHY[kind],
            )
        )
    for name in passes.names():
        key, one = (name, most), (name, 1)
        verdicts.append(
            compared(
                results,
                f"{name}, no table in memory: {most} layers ÷ 1 (equation: {most} for QEMU)",
                float(most),
                key,
                one,
                MISS,
                better="equal" if name == qemu else "lower",
                check=name == qemu,
                why="the request's own part, which does not grow with the chain, is in both",
            )
        )
    return Section(
        paper=(
            "A look-up costs Y = [Hit x T_M + Miss x (T_D + T_L + T_F) + UnAl x T_F] x N, with 100 ns, 80 µs, 5 µs and"
            " 1 µs: it grows with the length N of the chain."
        ),
        ours=(
            "Reads of 4 KiB over NBD, one after another, at places that no layer has, so that QEMU looks into all N"
            f" layers, of a disk of 16 GiB on a simulated SSD ({slow.ABOUT['ssd']}), without the page cache: the first"
            " in each 512 MiB, which finds no table in memory (Miss = 1), and reads after it (UnAl = 1). Shown is what"
            " a request takes beyond one with one layer and all tables in memory. For isobath, which looks into one"
            f" map, N is 1 in the equation. T_F is fitted to one step, from {STEP[0]} layer to {STEP[1]}; what the"
            " other lengths take is calculated. "
        )
        + passes.ABOUT_CONTENDERS,
        parts=[
            figures.saved(results, "eq1", title),
            Table("Constants", ["", "here, µs", "paper, µs", "how"], constant_rows),
            Table(
                "Equation 1",
                ["", "disk by", "layers", "measured, µs", "with our constants, µs", "with the paper's, µs"],
                rows,
            ),
        ],
        verdicts=verdicts,
    )


WHY = {
    HIT: (
        "QEMU's cost grows with the square of the length: each layer asks all below it whether they are there"
        " (`bdrv_is_inserted`, half of the CPU at 300 layers)"
    ),
    MISS: (
        "T_D is a read of one request alone; and each layer asks all below it whether they are there, which the"
        " equation does not know"
    ),
}
ABOUT = {
    "T_M": "isobath's look-up in memory, median",
    "T_D": "a read of a table of 64 KiB from the simulated SSD, O_DIRECT",
    "T_L": "a read of 4 KiB from the page cache",
    "T_F": "QEMU's time for one more layer, tables in memory",
}


def positive(value):
    return value if value is None or value > 0 else None


def text(value, digits=1):
    return "-" if value is None else f"{value:,.{digits}f}"
