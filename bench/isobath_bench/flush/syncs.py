"""Syncs of the image and flushes of the device that each flush of a guest becomes, counted by the kernel."""

import itertools
import random
import re

from .. import plot, report, tools
from ..rounds import Samples, rotated
from . import contenders, counts, log, mounts
from .contenders import FULL, OVERLAY, THIN

SYSTEMS = ["ext4", "XFS", "btrfs"]
CLUSTER = 64 << 10
WARM_UP = 50
CLIENTS = 8

APPEND, RANDOM, OVERWRITE, COPY, CONCURRENT = WORKLOADS = [
    "64 KiB append", "4 KiB random, allocating", "4 KiB random overwrite", "4 KiB random over a base",
    f"4 KiB random, allocating, {CLIENTS} clients",
]  # fmt: skip
KIND = {OVERWRITE: FULL, COPY: OVERLAY}


def length():
    """Flushes that are counted."""
    return 40 if tools.QUICK else 400


def offsets(workload, seed):
    """A cluster's offset for each write: each comes once."""
    places = [cluster * CLUSTER for cluster in range(contenders.size() // CLUSTER)]
    if workload != APPEND:
        random.Random(seed).shuffle(places)
    return places[: 1 + WARM_UP + length()]


def check_log(server, kind, seen):
    """Holds isobath's own counter of syncs against the kernel's."""
    found = re.search(r"syncs=(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", server.said))
    if not found:
        raise tools.Failed(f"{server.name} did not log its syncs: {server.said[-500:]}")
    if int(found.group(1)) != seen:
        raise tools.Failed(f"{server.name} on {kind} counted {found.group(1)} syncs, the kernel {seen}")


def measure(system, counter, contender, workload, seed):
    """Counts one workload, and what opening, the first flush and closing cost."""
    image = contender.image(system.directory, KIND.get(workload, THIN))
    system.settle()
    places = offsets(workload, seed)
    block = CLUSTER if workload == APPEND else 4096
    first, warm, counted = places[:1], places[1 : 1 + WARM_UP], places[1 + WARM_UP :]
    clients = CLIENTS if workload == CONCURRENT else 1
    marks = [counter.now()]
    with contender.serve(image) as server:
        marks.append(counter.now())
        log.replay(server, log.write_and_flush(first, block))
        marks.append(counter.now())
        log.replay(server, log.write_and_flush(warm, block))
        marks.append(counter.now())
        done = log.replay(server, *(log.write_and_flush(counted[number::clients], block) for number in range(clients)))
        marks.append(counter.now())
    marks.append(counter.now())
    if server.name == "isobath":
        check_log(server, system.kind, (marks[-1] - marks[0])["syncs"])
    opening, initial, _, steady, closing = (later - earlier for earlier, later in itertools.pairwise(marks))
    around = {
        f"{when}_{what}": part[what]
        for when, part in (("open", opening), ("first", initial), ("close", closing))
        for what in ("syncs", "flushes")
    }
    return {**steady.per(done["flushes"]), **around, "guest_flushes": done["flushes"]}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody()
    for kind in SYSTEMS:
        for number in range(min(rounds, 3)):
            # A new file system each round, so that none grows old.
            with mounts.mounted(kind) as system:
                for name in rotated(list(everybody), number * 3):
                    for workload in WORKLOADS:
                        if everybody[name].has(KIND.get(workload, THIN)):
                            with counts.counting(system) as counter:
                                samples.attempt(
                                    (kind, name, workload),
                                    lambda: measure(system, counter, everybody[name], workload, number),
                                )
    return {"samples": samples.raw()} | summary(samples, list(everybody))


def summary(samples, names):
    tables = []
    for title, field, form in (
        ("Syncs of the image for each flush of the guest", "syncs", "{:.2f}"),
        ("Flushes of the device for each flush of the guest", "flushes", "{:.2f}"),
        ("Write requests to the device for each flush of the guest", "writes", "{:.1f}"),
        ("KiB written to the device for each flush of the guest", "kib", "{:,.0f}"),
    ):
        rows = [
            [kind, name, *(samples.text((kind, name, workload), field, form) for workload in WORKLOADS)]
            for kind in SYSTEMS
            for name in names
        ]
        tables.append({"title": title, "columns": ["file system", "server", *WORKLOADS], "rows": rows})
    tables[0]["text"] = (
        f"{length()} writes with a flush after each, after {WARM_UP} that are not counted; through NBD, no FUA. Syncs"
        " are the kernel's trace events of the file system, which see system calls and io_uring alike; requests are"
        " the loop device's (`stat`)."
    )
    whens = ["open", "first", "close"]
    tables.append(
        {
            "title": "Apart from these: opening, the first flush, closing",
            "text": f"{APPEND}: syncs of the image / flushes of the device.",
            "columns": ["file system", "server", "opening", "first write and flush", "closing"],
            "rows": [
                [
                    kind,
                    name,
                    *(
                        " / ".join(
                            samples.text((kind, name, APPEND), f"{when}_{what}") for what in ("syncs", "flushes")
                        )
                        for when in whens
                    ),
                ]
                for kind in SYSTEMS
                for name in names
            ],
        }
    )
    goals = []
    name = f"isobath {contenders.GOAL}"
    why = None if name in names else f"no mode {contenders.GOAL}"
    for workload in WORKLOADS:
        values = [samples.median((kind, name, workload), "syncs") for kind in SYSTEMS]
        value = None if None in values else max(values)
        limit = 0.5 if workload == CONCURRENT else 1.0
        goals.append(
            report.limit(
                f"host syncs a guest flush, {workload}, any file system",
                value,
                at_most=limit,
                unit="",
                why=why,
                digits=4,
            )
        )
    for kind in ("ext4", "XFS"):
        value = samples.median((kind, name, APPEND), "flushes")
        goals.append(
            report.limit(
                f"device flushes a guest flush, {APPEND}, thin image on {kind}",
                value,
                at_most=1.05,
                unit="",
                why=why,
                digits=4,
            )
        )
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    figures = []
    for field, title in (("syncs", "Syncs of the image"), ("flushes", "Flushes of the device")):
        bars = {
            f"{workload}, ext4": {name: samples.median(("ext4", name, workload), field) for name in names}
            for workload in (APPEND, RANDOM, COPY, CONCURRENT)
        }
        figures.append(plot.bars(f"flush_cost-{field}.svg", f"{title} for each flush of the guest", "", bars))
    return {"tables": tables, "goals": goals, "figures": figures, "notes": contenders.missing_note() + notes}
