"""The server's CPU time for a write of 64 KiB to a new cluster, with and without a flush behind it, and how much
of it is compression."""

import re
import shutil
import subprocess

from .. import fio, report, tools
from ..flush.latency import text_of_ratio
from ..rounds import Samples, rotated
from . import contenders, loads, places
from .contenders import GOAL, JOURNAL, RAW
from .loads import CLUSTER

FLUSHED, STREAMED = "a flush behind each", "no flush"
DATA = {"compressible": loads.COMPRESSIBLE, "incompressible": loads.INCOMPRESSIBLE}
SAMPLE = re.compile(r"^\s*([\d.]+)%.*\blz4", re.M | re.I)


def size():
    return 64 << 20 if tools.QUICK else 1 << 30


def lz4_share(profile):
    """The part of a profile's samples that are in LZ4."""
    said = tools.run(
        "perf", "report", "--stdio", "--no-children", "--percent-limit=0", "--sort=symbol", f"--input={profile}"
    )
    return sum(map(float, SAMPLE.findall(said))) / 100


def measure(place, contender, how, data):
    with contender.fresh(place, size()) as (server, _):
        profile, watching = tools.WORK / "embedded.perf", None
        if shutil.which("perf"):
            command = ["perf", "record", "--quiet", "--freq=999", f"--output={profile}", f"--pid={server.process.pid}"]
            watching = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if how == FLUSHED:
                where = loads.sequential(size(), CLUSTER, 1, 8_000)
                cpu = loads.write_and_flush(server, where, CLUSTER, data=DATA[data])["cpu_us"]
            else:
                done = fio.load(server, rw="write", block="64k", depth=8, seconds=600, once=True, extra=DATA[data])
                cpu = done["cpu_us_per_request"]
        finally:
            if watching:
                watching.terminate()
                watching.wait()
        found = {"cpu_us": cpu}
        if watching and profile.exists():
            found["lz4"] = lz4_share(profile)
            profile.unlink()
        return found


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody()
    cases = [(how, data) for how in (FLUSHED, STREAMED) for data in DATA]
    with places.place("free") as place:
        for number in range(rounds):
            for name in rotated([name for name in everybody if not name.startswith("QEMU")], number):
                for case in cases:
                    samples.attempt((*case, name), lambda: measure(place, everybody[name], *case))
    rows, goals = [], []
    for case in cases:
        journal = samples.median((*case, JOURNAL), "cpu_us")
        for name in (GOAL, JOURNAL, contenders.ORDERED, RAW):
            key = (*case, name)
            value = report.ratio(samples.median(key, "cpu_us"), journal)
            rows.append(
                [
                    *case,
                    name,
                    samples.text(key, "cpu_us", "{:.1f}"),
                    text_of_ratio(value),
                    samples.text(key, "lz4", "{:.1f} %", 100),
                ]
            )
        value = report.ratio(samples.median((*case, GOAL), "cpu_us"), journal)
        goals.append(
            report.limit(
                f"CPU of a write of 64 KiB, {', '.join(case)}: embedded ÷ journal",
                value,
                at_most=1.1,
                why="no mode embedded",
            )
        )
    table = {
        "title": "CPU of a write of 64 KiB to a new cluster",
        "text": (
            "The server's, all threads, user and kernel, on a disk that costs nothing, in memory. LZ4: its part of the"
            " samples of `perf record`."
        ),
        "columns": ["flushes", "data", "server", "CPU µs a write", "of journal", "LZ4"],
        "rows": rows,
    }
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [],
        "notes": contenders.missing_note() + notes,
    }
