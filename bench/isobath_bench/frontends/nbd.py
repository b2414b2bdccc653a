"""Reads over NBD: the scenario nbd_reads, as a part."""

from scenarios import nbd_reads

from .. import report
from ..rounds import Samples


def run(rounds, seconds):
    result = nbd_reads.run(rounds, seconds)
    samples, rows = Samples(), []
    for load, servers in result["loads"].items():
        for server, each in servers.items():
            samples[load, server] = each
            rows.append(
                [
                    load,
                    server,
                    f"{report.median(each, 'iops'):,.0f}",
                    f"{report.median(each, 'bytes_per_second') / 2**20:,.0f}",
                    f"{report.median(each, 'cpu_us_per_request'):.2f}",
                ]
            )
    table = {
        "title": "NBD",
        "text": "One layer, page cache; Isobath and qemu-nbd serve the same qcow2 image, nbdkit the same bytes raw.",
        "columns": ["load", "server", "IOPS", "MiB/s", "server's CPU µs per request"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": result["goals"], "figures": [], "notes": []}
