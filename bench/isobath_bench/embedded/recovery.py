"""How long the next server takes that opens a disk whose server was killed, every cluster newly written."""

import os
import shutil

from .. import fio, plot, report, servers, tools
from ..rounds import Samples
from . import contenders, loads, places
from .contenders import GOAL, Isobath

COLD, WARM = "cold caches", "warm"
# No zone is ever sealed: all mappings are found in the data.
ALL_OPEN = ("--zones", "4096")


def size():
    return 1 << 30 if tools.QUICK else int(os.environ.get("ISOBATH_BENCH_RECOVERY_GIB", "128")) << 30


def fill(server, count):
    """Writes 4 KiB to each cluster, in order, and flushes at the end."""
    extra = [*loads.COMPRESSIBLE, "--end_fsync=1", f"--size={count << 16}", f"--io_size={count << 12}"]
    done = fio.load(server, rw="write:60k", block="4k", depth=64, seconds=3600, once=True, extra=extra)
    if done["requests"] != count:
        raise tools.Failed(f"{done['requests']:,} of {count:,} clusters were written")


def crashed(path, place, contender, options):
    """An image of which every cluster was written, whose server was killed."""
    contender.make(path, place, size())
    if isinstance(contender, Isobath):
        # As on a block device: what is written ahead would fill a file of that size.
        serving = servers.isobath(path, "--metadata", contender.mode, "--slow-disk", places.FREE, *options)
    else:
        serving = servers.qemu_nbd(path, program=contender.program)
    with serving as server:
        fill(server, size() >> 16)
        server.process.kill()
        server.process.wait()


def again(path, contender, options):
    """Seconds until the next server greets a client, and its memory."""
    if isinstance(contender, Isobath):
        serving = servers.isobath(path, "--metadata", contender.mode, *options, patience=3600)
    else:
        serving = servers.qemu_nbd(path, program=contender.program, patience=3600)
    with serving as server:
        found = {"seconds": server.ready, "rss": server.peak_rss()}
        server.process.kill()
        server.process.wait()
    return found


def cases():
    """Contenders and options, by what the table calls them."""
    everybody = contenders.everybody()
    found = {}
    if GOAL in everybody:
        if contenders.has(*ALL_OPEN):
            found["isobath embedded, nothing collected"] = (everybody[GOAL], ALL_OPEN)
        found[GOAL] = (everybody[GOAL], ())
    found |= {name: (everybody[name], ()) for name in (contenders.JOURNAL, *contenders.qemu_names())}
    return found


def run(rounds, seconds):
    del rounds, seconds
    samples = Samples()
    directory = tools.WORK / "embedded-recovery"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    place = places.Place("file", directory)
    made, copy = directory / "crashed", directory / "copy"
    try:
        for name, (contender, options) in cases().items():

            def reopen(when):
                tools.run("cp", "--sparse=always", made, copy)
                place.settle()
                if when == COLD:
                    tools.drop_caches()
                else:
                    tools.run("dd", f"if={copy}", "of=/dev/null", "bs=4M")
                return again(copy, contender, options)

            def check():
                tools.run("cp", "--sparse=always", made, copy)
                return {"seconds": tools.timed(tools.ISOBATH, "check", "-q", "-r", "all", copy)}

            made.unlink(missing_ok=True)
            try:
                crashed(made, place, contender, options)
            except tools.Failed as error:
                samples.add((name, COLD), {"failed": "failed", "why": str(error)})
                continue
            samples.attempt((name, COLD), lambda: reopen(COLD))
            samples.attempt((name, WARM), lambda: reopen(WARM))
            if isinstance(contender, Isobath):
                samples.attempt((name, "check"), check)
    finally:
        shutil.rmtree(directory)
    return {"samples": samples.raw()} | summary(samples)


def summary(samples):
    rows, bars = [], {}
    for name in cases():
        rows.append(
            [
                name,
                *(samples.text((name, when), "seconds", "{:.2f}") for when in (COLD, WARM, "check")),
                samples.text((name, COLD), "rss", "{:,.0f}", 2**-20),
            ]
        )
        bars[name] = {when: samples.median((name, when), "seconds") for when in (COLD, WARM)}
    table = {
        "title": "Recovery",
        "text": (
            f"A disk of {size() >> 30} GiB: 4 KiB written to each of its {size() >> 16:,} clusters, one flush, the"
            " server killed. Seconds from the start of the next one until it greets a client, on a copy of the image;"
            " those of `isobath check -r all`."
        ),
        "columns": ["server", f"{COLD}, s", f"{WARM}, s", "check, s", "peak RSS, MiB"],
        "rows": rows,
    }
    limit = 1.9 * size() / (128 << 30)
    goals = [
        report.limit(
            f"recovery, {GOAL}, {when}, {size() >> 30} GiB",
            samples.median((GOAL, when), "seconds"),
            at_most=round(limit, 2),
            unit="s",
            why="no mode embedded",
        )
        for when in (COLD, WARM)
    ]
    figure = plot.bars("embedded-recovery.svg", f"Ready again after a crash, {size() >> 30} GiB", "s", bars, log=True)
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {"tables": [table], "goals": goals, "figures": [figure], "notes": contenders.missing_note() + notes}
