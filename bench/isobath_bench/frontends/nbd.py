"""Reads over NBD: the scenario nbd_reads, as a part; and writes in place."""

from scenarios import nbd_reads

from .. import fio, report, servers
from ..rounds import Samples, by_case
from . import images, paired

WRITE = "4 KiB random write, qd 32"
SERVERS = {
    "isobath": lambda: servers.isobath(images.filled("qcow2")),
    "qemu-nbd": lambda: servers.qemu_nbd(images.filled("qcow2")),
    "nbdkit raw": lambda: servers.nbdkit(images.filled("raw")),
}


def measure(_, name, seconds):
    with SERVERS[name]() as server:
        how = dict(rw="randwrite", block="4k", depth=32)
        fio.load(server, **how, seconds=1)
        return fio.load(server, **how, seconds=seconds)


def run(rounds, seconds):
    result = nbd_reads.run(rounds, seconds)
    samples, rows = Samples(), []
    for load, each in result["loads"].items():
        samples.update({(load, server): found for server, found in each.items()})
    samples.update(by_case(rounds, [(WRITE,)], list(SERVERS), lambda *key: measure(*key, seconds)))
    for load, server in samples:
        each = samples[load, server]
        rows.append(
            [
                load,
                server,
                f"{report.median(each, 'iops'):,.0f}",
                f"{report.median(each, 'bytes_per_second') / 2**20:,.0f}",
                f"{report.median(each, 'cpu_us_per_request'):.2f}",
            ]
        )
    own, peer = (WRITE, "isobath"), (WRITE, "nbdkit raw")
    write = paired.goal(samples, "4 KiB writes in place: IOPS ÷ nbdkit raw", own, peer, "iops", at_least=1.2)
    table = {
        "title": "NBD",
        "text": (
            "One layer, page cache; Isobath and qemu-nbd serve the same qcow2 image, nbdkit the same bytes raw. Writes"
            " go to clusters that have data."
        ),
        "columns": ["load", "server", "IOPS", "MiB/s", "server's CPU µs per request"],
        "rows": rows,
    }
    return {
        "samples": samples.raw(), "tables": [table], "goals": [*result["goals"], write], "figures": [], "notes": [],
    }  # fmt: skip
