"""Writes that nobody flushes: what a way of writing metadata costs those who do not need it."""

from .. import fio, plot, report
from ..rounds import Samples, rotated
from . import contenders, mounts
from .contenders import RAW_QEMU, THIN
from .latency import spread, text_of_ratio

STREAM, RANDOM = "64 KiB sequential", "4 KiB random"
LOADS = {
    STREAM: {"rw": "write", "block": "64k", "depth": 8},
    RANDOM: {"rw": "randwrite", "block": "4k", "depth": 32},
}


def measure(system, contender, what, seconds):
    image = contender.image(system.directory, THIN)
    system.settle()
    with contender.serve(image) as server:
        return fio.load(server, **LOADS[what], seconds=max(seconds, 10), once=True)


def run(rounds, seconds):
    samples = Samples()
    everybody = {name: each for name, each in contenders.everybody(few=True).items() if name != RAW_QEMU}
    names = list(everybody)
    with mounts.mounted("ext4", filled=True) as system:
        for number in range(rounds):
            for name in rotated(names, number):
                for what in LOADS:
                    samples.attempt((what, name), lambda: measure(system, everybody[name], what, seconds))
    rows, goals = [], []
    for what in LOADS:
        ordered = samples.median((what, "isobath ordered"), "bytes_per_second")
        for name in names:
            key = (what, name)
            value = report.ratio(samples.median(key, "bytes_per_second"), ordered)
            rows.append(
                [
                    what,
                    name,
                    samples.text(key, "bytes_per_second", "{:,.0f}", 2**-20),
                    spread(samples, key, "bytes_per_second"),
                    text_of_ratio(value),
                    samples.text(key, "cpu_us_per_request", "{:.1f}"),
                ]
            )
        name = f"isobath {contenders.GOAL}"
        value = report.ratio(samples.median((what, name), "bytes_per_second"), ordered)
        goals.append(
            report.limit(
                f"no flushes, {what}: {contenders.GOAL} ÷ ordered",
                value,
                at_least=0.97,
                why=None if name in names else f"no mode {contenders.GOAL}",
            )
        )
    table = {
        "title": "No flushes",
        "text": (
            f"A new thin image of {contenders.size() >> 20} MiB on ext4 (raw: a written file), written once through the"
            " page cache, no flush."
        ),
        "columns": ["load", "server", "MiB/s", "spread", "of ordered", "CPU µs a request"],
        "rows": rows,
    }
    bars = {what: {name: scaled(samples.median((what, name), "bytes_per_second")) for name in names} for what in LOADS}
    figure = plot.bars("flush_cost-no-flush.svg", "Writes without a flush", "MiB/s", bars)
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note(),
    }


def scaled(value):
    return None if value is None else value / 2**20
