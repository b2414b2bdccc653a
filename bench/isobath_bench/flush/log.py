"""I/O logs that fio replays over NBD: writes at given places, flushes where they are wanted."""

import json

from .. import tools

HEADER = "fio version 2 iolog\nnbd add\nnbd open\n"


def write_and_flush(offsets, block):
    """A write at each offset, a flush after each."""
    return [step for offset in offsets for step in (("write", offset, block), ("sync", 0, 0))]


def replay(server, *logs):
    """Replays logs, each by a client of its own, at queue depth 1 and as fast as it goes."""
    command = ["fio", "--output-format=json"]
    paths = []
    for number, steps in enumerate(logs):
        path = tools.WORK / f"flush-{number}.iolog"
        path.write_text(HEADER + "".join(f"nbd {what} {offset} {length}\n" for what, offset, length in steps) + "nbd close\n")
        paths.append(path)
        command += [f"--name=client-{number}", "--ioengine=nbd", f"--uri={server.uri}", f"--read_iolog={path}"]
    try:
        out = tools.run(*command)
    finally:
        for path in paths:
            path.unlink()
    jobs = json.loads(out[out.index("{"):])["jobs"]
    flushes = sum(job["sync"].get("total_ios", 0) for job in jobs)
    writes = sum(job["write"]["total_ios"] for job in jobs)
    intended = [sum(what == kind for steps in logs for what, *_ in steps) for kind in ("sync", "write")]
    if any(job["error"] for job in jobs) or [flushes, writes] != intended:
        raise tools.Failed(f"{server.name}: {flushes} flushes and {writes} writes were done, of {intended}")
    seconds = max(job["job_runtime"] for job in jobs) / 1000
    return {"flushes": flushes, "writes": writes, "seconds": seconds, "flushes_per_second": flushes / max(seconds, 1e-3)}
