"""Applications that flush: what ext4 on the disk is sent under a mail server and a database, replayed."""

import contextlib
import os

from .. import plot, report
from ..rounds import Samples, rotated
from . import contenders, counts, log, mounts, traces
from .latency import spread, text_of_ratio, too_noisy

SIZE = 512 << 20
SLICES = 8


def measure(system, contender, disk, steps):
    """The whole trace in slices, and what each flush of the guest became."""
    reference = contenders.reference()
    images = [each.image(system.directory, disk=disk) for each in (contender, reference)]
    size = -(-len(steps) // SLICES)
    slices = [[steps[start : start + size]] for start in range(0, len(steps), size)]
    system.settle()
    with counts.counting(system) as counter, contender.serve(images[0]) as server, reference.serve(images[1]) as raw:
        total = counts.Counts()

        @contextlib.contextmanager
        def counted():
            before = counter.now()
            yield
            total.add(counter.now() - before)

        done = log.take_turns(server, raw, slices, counted)
    for path in images:
        os.unlink(path)
    return {**done, **total.per(done["flushes"])}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody(few=True)
    names = list(everybody)
    found = {application: traces.recorded(application, SIZE) for application in traces.APPLICATIONS}
    with mounts.mounted("ext4", filled=True) as system:
        for number in range(rounds):
            for name in rotated(names, number * 3):
                for application, (disk, steps) in found.items():
                    samples.attempt((application, name), lambda: measure(system, everybody[name], disk, steps))
    rows, goals, bars = [], [], {}
    for application in found:
        of_raw = {name: samples.median((application, name), "of_raw") for name in names}
        _, best_of_raw = contenders.best_qemu(of_raw)
        for name in names:
            key = (application, name)
            rows.append(
                [
                    application,
                    name,
                    samples.text(key, "seconds", "{:.2f}"),
                    samples.text(key, "of_raw", "{:.2f}x"),
                    spread(samples, key, "of_raw"),
                    text_of_ratio(report.ratio(of_raw[name], best_of_raw)),
                    *(samples.text(key, field, "{:.2f}") for field in ("syncs", "flushes")),
                ]
            )
        name = f"isobath {contenders.GOAL}"
        why = None if name in names else f"no mode {contenders.GOAL}"
        noise = too_noisy(of_raw)
        value = None if noise else of_raw.get(name)
        goals.append(report.limit(f"{application} ÷ raw, fully written", value, at_least=0.95, why=why or noise))
        bars[application] = of_raw
    about = "; ".join(
        f"{application}: {sum(what == 'write' for what, *_ in steps):,} writes of"
        f" {sum(length for what, _, length in steps) >> 20} MiB, {sum(what == 'sync' for what, *_ in steps):,} flushes"
        for application, (_, steps) in found.items()
    )
    table = {
        "title": "Applications",
        "text": (
            "The requests of ext4, recorded once on a loop device, replayed one after another on an image on ext4 that"
            f" is thin at first, in {SLICES} slices, each also on a fully written raw file beside it: *of raw* is the"
            f" median of the slices' ratios. {about}."
        ),
        "columns": [
            "application",
            "server",
            "s",
            "of raw",
            "spread",
            "of QEMU's best",
            "syncs a flush",
            "device flushes a flush",
        ],
        "rows": rows,
    }
    figure = plot.bars("flush_cost-apps.svg", "Applications: speed of raw, fully written", "", bars, unit="x")
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note() + notes,
    }
