"""A stream into a new disk with one flush at its end, as `dd` and `sync` in a guest make it, of blocks that
compress and blocks that do not."""

import json

from .. import plot, report, tools
from ..flush.latency import spread, text_of_ratio
from ..rounds import Samples, rotated
from . import contenders, loads, places
from .contenders import GOAL

PLACES = ["hdd", "ssd", "ext4"]
# Which part of the clusters does not compress.
PARTS = {"0 %": 0, "50 %": 1, "100 %": 2}


def size():
    return 64 << 20 if tools.QUICK else 1 << 30


def measure(place, contender, incompressible):
    """Every cluster in order, 8 requests under way: both sorts of data in turn, each by a job of its own."""
    step = loads.CLUSTER
    with contender.fresh(place, size()) as (server, _):
        command = [
            "fio",
            "--output-format=json",
            "--thread",
            "--ioengine=nbd",
            f"--uri={server.uri}",
            "--bs=64k",
            "--end_fsync=1",
        ]
        if incompressible == 1:
            sorts = [loads.COMPRESSIBLE, loads.INCOMPRESSIBLE]
            for number, data in enumerate(sorts):
                command += [
                    f"--name=part-{number}",
                    f"--offset={number * step}",
                    f"--size={size() - number * step}",
                    f"--io_size={size() // 2}",
                    "--rw=write:64k",
                    "--iodepth=4",
                    *data,
                ]
        else:
            data = loads.INCOMPRESSIBLE if incompressible else loads.COMPRESSIBLE
            command += ["--name=all", f"--size={size()}", "--rw=write", "--iodepth=8", *data]
        before = server.cpu()
        out = tools.run(*command)
        cpu = server.cpu() - before
    jobs = json.loads(out[out.index("{") :])["jobs"]
    done = sum(job["write"]["io_bytes"] for job in jobs)
    if any(job["error"] for job in jobs) or done != size():
        raise tools.Failed(f"{contender.name}: {done:,} bytes were written, of {size():,}")
    # Until the last flush has ended.
    seconds = max(job["job_runtime"] for job in jobs) / 1000
    return {"seconds": seconds, "bytes_per_second": done / seconds, "cpu_us": cpu / (done / step) * 1e6}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody()
    names = list(everybody)
    for where in PLACES:
        with places.place(where) as place:
            for number in range(rounds):
                for name in rotated(names, number):
                    for part, how in PARTS.items():
                        samples.attempt((where, part, name), lambda: measure(place, everybody[name], how))
    rows, goals, bars = [], [], {}
    for where in PLACES:
        for part in PARTS:
            own = samples.median((where, part, GOAL), "bytes_per_second")
            for name in names:
                key = (where, part, name)
                rows.append(
                    [
                        where,
                        part,
                        name,
                        samples.text(key, "seconds", "{:.2f}"),
                        samples.text(key, "bytes_per_second", "{:,.0f}", 1e-6),
                        spread(samples, key, "seconds"),
                        text_of_ratio(report.ratio(own, samples.median(key, "bytes_per_second"))),
                        samples.text(key, "cpu_us", "{:.0f}"),
                    ]
                )
            bars[f"{where}, {part} incompressible"] = {
                name: samples.median((where, part, name), "seconds") for name in names
            }
            default = contenders.qemu_names()[0]
            value = report.ratio(own, samples.median((where, part, default), "bytes_per_second"))
            goals.append(
                report.limit(
                    f"dd, {where}, {part} incompressible: embedded ÷ {default}",
                    value,
                    at_least=1.0,
                    why="no mode embedded",
                )
            )
    table = {
        "title": "dd",
        "text": (
            f"{size() >> 20} MiB in writes of 64 KiB, 8 at a time, into a new disk, one flush at the end;"
            " *incompressible*: the part of the clusters that do not compress."
        ),
        "columns": ["disk", "incompressible", "server", "s", "MB/s", "spread", "embedded ÷ it", "CPU µs a cluster"],
        "rows": rows,
    }
    figure = plot.bars("embedded-dd.svg", f"dd of {size() >> 20} MiB and a sync", "s", bars)
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note() + notes,
    }
