"""Load: fio's nbd engine."""

import json

from . import tools


def load(server, *, rw, block, depth, seconds, jobs=1, once=False, extra=()):
    """Runs fio against a server and gives the figures of the run.

    With `once` it ends after one pass over the disk, and after `seconds` at the latest.
    """
    how = [] if once else ["--time_based", "--norandommap"]
    before = server.cpu()
    out = tools.run(
        "fio", "--name=load", "--ioengine=nbd", f"--uri={server.uri}", f"--rw={rw}",
        f"--bs={block}", f"--iodepth={depth}", f"--numjobs={jobs}", "--group_reporting",
        f"--runtime={seconds}", "--randrepeat=0", "--output-format=json", *how, *extra,
    )  # fmt: skip
    cpu = server.cpu() - before
    # fio prints notes before its JSON.
    job = json.loads(out[out.index("{") :])["jobs"][0]
    side = job["write" if "write" in rw else "read"]
    requests = side["total_ios"]
    return {
        "iops": side["iops"],
        "bytes": side["io_bytes"],
        "bytes_per_second": side["bw_bytes"],
        "cpu_us_per_request": cpu / max(requests, 1) * 1e6,
        "p99_us": side["clat_ns"].get("percentile", {}).get("99.000000", 0) / 1000,
        "requests": requests,
    }
