"""Load on a device, on a raw file and on a disk shown as a file: `isobath-load` and fio.

Each gives requests a second, and the CPU time of a request: of all (the client's and the server's), and the server's.
"""

import json
import os
import resource
from functools import cache
from pathlib import Path

from .. import tools

ISOBATH_LOAD = Path(os.environ.get("ISOBATH_LOAD", tools.TARGET / "release" / "isobath-load"))

# Data that is in the page cache stays there.
FIO = ["fio", "--name=load", "--invalidate=0", "--thread", "--output-format=json"]


def isobath_load(*arguments):
    """Runs `isobath-load`; gives what its line tells."""
    if not ISOBATH_LOAD.exists():
        raise tools.Failed(f"{ISOBATH_LOAD} is not there: make build")
    return json.loads(tools.run(ISOBATH_LOAD, *arguments))


def figures(done, server_cpu):
    """A sample out of the line of a run."""
    if done["errors"]:
        raise tools.Failed(f"{done['errors']:,} of {done['requests']:,} requests failed")
    server = server_cpu / max(done["requests"], 1) * 1e6
    return {
        "requests": done["requests"],
        "iops": done["iops"],
        "bytes_per_second": done["bytes_per_second"],
        "cpu_us": done["cpu_us_per_request"] + server,
        "server_cpu_us": server,
        "p50_us": done["p50_ns"] / 1000,
        "p99_us": done["p99_ns"] / 1000,
    }


def shape(*, rw="randread", block="4k", depth=32, queues=1, seconds, poll=False, extra=()):
    """A load as options of `isobath-load`."""
    options = ["--rw", rw, "--bs", block, "--qd", depth, "--queues", queues, "--seconds", seconds, *extra]
    return options + (["--poll"] if poll else [])


def vhost_user(server, **load):
    """Load on a vhost-user-blk device."""
    before = server.cpu()
    try:
        done = isobath_load("vhost-user", server.socket, *shape(**load))
    except tools.Failed as error:
        server.check(error)
    return figures(done, server.cpu() - before)


def raw(path, *, direct=False, **load):
    """The same load by the same program on a file."""
    how = ["--direct"] if direct else []
    return figures(isobath_load("raw", path, *how, *shape(**load)), 0)


def cpu_of_children():
    """The CPU time of the programs that have been run so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@cache
def cpu_of_start():
    """The CPU time that fio takes to start and end, in seconds."""
    before = cpu_of_children()
    tools.run(*FIO, "--ioengine=null", "--size=4k", "--number_ios=1")
    return cpu_of_children() - before


def fio(path, *, rw="randread", block="4k", depth=32, seconds, engine="io_uring", direct=False, server=None, extra=()):
    """Load by fio on a file; of a server, if there is one."""
    start = cpu_of_start()
    server_before, before = server.cpu() if server else 0, cpu_of_children()
    try:
        out = tools.run(
            *FIO,
            f"--filename={path}",
            f"--ioengine={engine}",
            f"--rw={rw}",
            f"--bs={block}",
            f"--iodepth={depth}",
            f"--runtime={seconds}",
            "--time_based",
            "--norandommap",
            "--randrepeat=0",
            f"--direct={int(direct)}",
            *extra,
        )
    except tools.Failed as error:
        if server:
            server.check(error)
        raise
    client = max(cpu_of_children() - before - start, 0)
    server_cpu = server.cpu() - server_before if server else 0
    job = json.loads(out[out.index("{") :])["jobs"][0]
    side = job["write" if "write" in rw else "read"]
    requests = side["total_ios"]
    percentiles = side["clat_ns"].get("percentile", {})
    done = {
        "requests": requests,
        "errors": job["error"],
        "iops": side["iops"],
        "bytes_per_second": side["bw_bytes"],
        "cpu_us_per_request": client / max(requests, 1) * 1e6,
        "p50_ns": percentiles.get("50.000000", 0),
        "p99_ns": percentiles.get("99.000000", 0),
    }
    return figures(done, server_cpu)
