"""Bytes, write requests and syncs of a write to a new cluster with a flush behind it, counted twice: what the
server sends its disk, and what reaches the device below a file system."""

import contextlib

from .. import report, tools
from ..flush import counts, mounts
from ..flush.latency import text_of_ratio
from ..rounds import Samples
from . import contenders, loads, places
from .contenders import GOAL
from .loads import CLUSTER

WARM_UP = 50
SIZE = 512 << 20
APPENDS = {f"{block >> 10} KiB append": block for block in (4096, 16 << 10, 64 << 10)}
STARTS, INSIDE, WHOLE = "4 KiB at random clusters' starts", "4 KiB within random clusters", "64 KiB, random clusters"
WORKLOADS = [*APPENDS, STARTS, INSIDE, WHOLE]


def length():
    """Writes that are counted."""
    return 40 if tools.QUICK else 400


def what(workload):
    """The size of a workload's writes, and their places."""
    count = WARM_UP + length()
    if workload in APPENDS:
        block = APPENDS[workload]
        return block, loads.sequential(SIZE, block, 1, count)[0]
    block = CLUSTER if workload == WHOLE else 4096
    return block, loads.scattered(SIZE, block, 1, count, 1, within=CLUSTER // 2 if workload == INSIDE else 0)[0]


def sent(place, contender, workload):
    """What a server sends its disk, by the disk's own count."""
    block, where = what(workload)
    with contender.fresh(place, SIZE, contenders.COUNTING) as (server, counting):
        loads.write_and_flush(server, [where[:WARM_UP]], block)
        before = contenders.requests(counting)
        loads.write_and_flush(server, [where[WARM_UP:]], block)
        after = contenders.requests(counting)
    return {name: (after[name] - before[name]) / length() for name in after}


def reached(place, counter, contender, workload):
    """What reaches a loop device below ext4, and the syncs of the image, by the kernel's counts."""
    block, where = what(workload)
    with contender.fresh(place, SIZE) as (server, _):
        loads.write_and_flush(server, [where[:WARM_UP]], block)
        before = counter.now()
        loads.write_and_flush(server, [where[WARM_UP:]], block)
        done = (counter.now() - before).per(length())
    # A flush is counted as a write of no bytes, too.
    return {**done, "writes": done["writes"] - done["flushes"]}


def run(rounds, seconds):
    del rounds, seconds
    samples = Samples()
    everybody = contenders.everybody()
    with places.place("free") as place:
        for name, contender in everybody.items():
            for workload in WORKLOADS:
                samples.attempt(("sent", name, workload), lambda: sent(place, contender, workload))
    with mounts.mounted("ext4") as system, contextlib.ExitStack() as stack:
        counter = stack.enter_context(counts.counting(system))
        place = places.Place("ext4", system.directory)
        for name, contender in everybody.items():
            for workload in WORKLOADS:
                samples.attempt(("reached", name, workload), lambda: reached(place, counter, contender, workload))

    def cell(which, name, workload):
        fields = [("writes", "{:.2f}", 1), ("flushes", "{:.2f}", 1), ("bytes_written", "{:,.1f}", 1 / 1024)]
        if which == "reached":
            fields = [("writes", "{:.2f}", 1), ("flushes", "{:.2f}", 1), ("syncs", "{:.2f}", 1), ("kib", "{:,.1f}", 1)]
        return " / ".join(samples.text((which, name, workload), *field) for field in fields)

    tables = [
        {
            "title": f"{title}, for each write and flush",
            "text": f"{text} {length()} writes, after {WARM_UP} that are not counted.",
            "columns": ["server", *WORKLOADS],
            "rows": [[name, *(cell(which, name, workload) for workload in WORKLOADS)] for name in everybody],
        }
        for which, title, text in (
            (
                "sent",
                "What a server sends its disk",
                (
                    "Write requests / flushes / KiB. The disk is a block device as far as the server knows: nothing is"
                    " written ahead for a file system's sake."
                ),
            ),
            (
                "reached",
                "What reaches the device below ext4",
                (
                    "Write requests, without those that only carry a flush / flushes / syncs of the image / KiB, zeroes"
                    " written ahead and the file system's own included."
                ),
            ),
        )
    ]
    goals = []
    for workload in WORKLOADS:
        for field in ("writes", "flushes"):
            value = samples.median(("sent", GOAL, workload), field)
            goals.append(
                report.limit(
                    f"embedded, {workload}: {field} for each",
                    value,
                    at_most=1.0,
                    unit="",
                    why="no mode embedded",
                    digits=4,
                )
            )
    ratios = []
    for workload in WORKLOADS:
        own = samples.median(("sent", GOAL, workload), "bytes_written")
        peers = [
            report.ratio(samples.median(("sent", name, workload), "bytes_written"), own)
            for name in everybody
            if name != GOAL
        ]
        ratios.append([workload, *map(text_of_ratio, peers)])
    tables.append(
        {
            "title": "Bytes sent, ÷ those of embedded",
            "columns": ["workload", *(name for name in everybody if name != GOAL)],
            "rows": ratios,
        }
    )
    apart = [
        abs(one - other)
        for name in everybody
        for workload in WORKLOADS
        if None
        not in (
            one := samples.median(("sent", name, workload), "flushes"),
            other := samples.median(("reached", name, workload), "syncs"),
        )
    ]
    goals.append(
        report.limit(
            "the simulated disk's count of flushes and the kernel's of syncs, furthest apart",
            max(apart, default=None),
            at_most=0.02,
            unit="",
            digits=4,
        )
    )
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": tables,
        "goals": goals,
        "figures": [],
        "notes": contenders.missing_note() + notes,
    }
