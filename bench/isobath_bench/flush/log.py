"""I/O logs that fio replays over NBD: writes at given places, flushes where they are wanted."""

import contextlib
import json
import statistics

from .. import tools

SYNC = ("sync", 0, 0)
HEADER = "fio version 2 iolog\nnbd add\nnbd open\n"


def write_and_flush(offsets, block):
    """A write at each offset, a flush after each."""
    return [step for offset in offsets for step in (("write", offset, block), SYNC)]


def replay(server, *logs):
    """Replays logs, each by a client of its own, at queue depth 1 and as fast as it goes."""
    command = ["fio", "--output-format=json"]
    paths = []
    for number, steps in enumerate(logs):
        path = tools.WORK / f"flush-{number}.iolog"
        path.write_text(
            HEADER + "".join(f"nbd {what} {offset} {length}\n" for what, offset, length in steps) + "nbd close\n"
        )
        paths.append(path)
        command += [f"--name=client-{number}", "--ioengine=nbd", f"--uri={server.uri}", f"--read_iolog={path}"]
    try:
        out = tools.run(*command)
    except tools.Failed as error:
        raise tools.Failed(f"{server.state()}; {str(error)[-200:]}") from error
    finally:
        for path in paths:
            path.unlink()
    jobs = json.loads(out[out.index("{") :])["jobs"]
    flushes = sum(job["sync"].get("total_ios", 0) for job in jobs)
    writes = sum(job["write"]["total_ios"] for job in jobs)
    intended = [sum(what == kind for steps in logs for what, *_ in steps) for kind in ("sync", "write")]
    if any(job["error"] for job in jobs) or [flushes, writes] != intended:
        raise tools.Failed(f"{server.name}: {flushes} flushes and {writes} writes were done, of {intended}")
    # What each client waited for its requests, without fio's own start.
    waited = sum(
        job[side]["lat_ns"]["mean"] * job[side]["total_ios"]
        for job in jobs
        for side in ("write", "sync")
        if job[side].get("total_ios")
    )
    return {"flushes": flushes, "writes": writes, "seconds": waited / len(jobs) / 1e9}


def take_turns(server, raw, slices, around=contextlib.nullcontext):
    """Replays slices of logs on `server`, and each on `raw` beside it: `of_raw` is the median of the slices'
    ratios, since whatever else the machine does in between holds both up. `around` is entered for each
    slice on `server`."""
    done = []
    for number, logs in enumerate(slices):

        def own():
            with around():
                return replay(server, *logs)

        runs = {"own": own, "raw": lambda: replay(raw, *logs)}
        # Neither is always the first.
        order = sorted(runs, reverse=number % 2 == 1)
        done.append({which: runs[which]() for which in order})
    each = [slice["own"] for slice in done]
    return {
        "of_raw": statistics.median(slice["raw"]["seconds"] / slice["own"]["seconds"] for slice in done),
        "seconds": sum(part["seconds"] for part in each),
        "flushes": sum(part["flushes"] for part in each),
        "flushes_per_second": statistics.median(part["flushes"] / part["seconds"] for part in each),
    }
