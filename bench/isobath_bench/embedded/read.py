"""Reads of what was written: by the server that wrote it, and by the next one after a close."""

from .. import fio, plot, report, tools
from ..flush.latency import spread, text_of_ratio
from ..rounds import Samples, rotated
from . import contenders, loads, places
from .contenders import GOAL, ORDERED

LOADS = {
    "4 KiB random, qd 32": {"rw": "randread", "block": "4k", "depth": 32},
    "64 KiB random, qd 8": {"rw": "randread", "block": "64k", "depth": 8},
    "1 MiB sequential, qd 4": {"rw": "read", "block": "1m", "depth": 4},
}
WROTE, CLOSED = "as written", "after a close"


def size():
    return 64 << 20 if tools.QUICK else 512 << 20


def measure(place, contender, seconds):
    path = contender.image(place, size())
    figures = {}
    try:
        for when in (WROTE, CLOSED):
            with contender.serve(path, place) as (server, _):
                if when == WROTE:
                    extra = [*loads.COMPRESSIBLE, "--end_fsync=1"]
                    fio.load(server, rw="write", block="64k", depth=8, seconds=600, once=True, extra=extra)
                for what, load in LOADS.items():
                    done = fio.load(server, **load, seconds=seconds)
                    figures[f"{what}, {when}"] = done["bytes_per_second"]
                    figures[f"{what}, {when}, CPU"] = done["cpu_us_per_request"]
    finally:
        path.unlink()
    return figures


def run(rounds, seconds):
    samples = Samples()
    everybody = {name: each for name, each in contenders.everybody().items() if each.name != contenders.RAW}
    names = list(everybody)
    with places.place("ext4") as place:
        for number in range(rounds):
            for name in rotated(names, number):
                samples.attempt((name,), lambda: measure(place, everybody[name], seconds))
    rows, goals, bars = [], [], {}
    for when in (WROTE, CLOSED):
        for what in LOADS:
            field = f"{what}, {when}"
            ordered = samples.median((ORDERED,), field)
            for name in names:
                value = report.ratio(samples.median((name,), field), ordered)
                cpu = samples.text((name,), f"{field}, CPU", "{:.1f}")
                rows.append(
                    [
                        when,
                        what,
                        name,
                        samples.text((name,), field, "{:,.0f}", 2**-20),
                        spread(samples, (name,), field),
                        text_of_ratio(value),
                        cpu,
                    ]
                )
            bars[field] = {
                name: samples.median((name,), field) and samples.median((name,), field) / 2**20 for name in names
            }
            value = report.ratio(samples.median((GOAL,), field), ordered)
            goals.append(
                report.limit(f"reads, {field}: embedded ÷ ordered", value, at_least=0.95, why="no mode embedded")
            )
    table = {
        "title": "Reads",
        "text": (
            f"{size() >> 20} MiB written once and flushed, on ext4, page cache; read by the same server, and by the"
            " next after a close."
        ),
        "columns": ["when", "load", "server", "MiB/s", "spread", "of ordered", "CPU µs a request"],
        "rows": rows,
    }
    figure = plot.bars("embedded-read.svg", "Reads of what was written", "MiB/s", bars)
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note() + notes,
    }
