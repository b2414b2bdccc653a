"""What it costs QEMU that its image is reached over NBD on the simulated disks: on a disk without costs, the same
image as a file and in an export."""

from .. import report, servers
from ..flush.latency import spread, text_of_ratio
from ..rounds import Samples, rotated
from . import loads, places
from .contenders import Qemu

SIZE = 64 << 30
CASES = [(4096, 1), (4096, 16), (64 << 10, 1), (64 << 10, 16)]


def run(rounds, seconds):
    samples = Samples()
    version, directory = next(iter(servers.qemus().items()))
    ways = {"a file": Qemu(version, "", directory, hop=False), "in an export": Qemu(version, "", directory, hop=True)}
    with places.place("free") as place:
        for number in range(rounds):
            for way in rotated(list(ways), number):
                for block, writers in CASES:

                    def measure():
                        with ways[way].fresh(place, SIZE) as (server, _):
                            where = loads.scattered(SIZE, block, writers, 40_000, number)
                            return loads.write_and_flush(server, where, block, seconds)

                    samples.attempt((block, writers, way), measure)
    rows = []
    for block, writers in CASES:
        direct, hop = (samples.median((block, writers, way), "flushes_per_second") for way in ways)
        more = None if None in (direct, hop) else f"{(1 / hop - 1 / direct) * 1e6:,.0f}"
        rows.append(
            [
                f"{block >> 10} KiB",
                writers,
                *(samples.text((block, writers, way), "flushes_per_second") for way in ways),
                text_of_ratio(report.ratio(hop, direct)),
                spread(samples, (block, writers, "in an export"), "flushes_per_second"),
                more or "-",
            ]
        )
    table = {
        "title": "What the way over NBD costs QEMU",
        "text": (
            f"{version} default: writes a second to random new clusters with a flush behind each, the image in memory,"
            " no simulated costs. The last column is the time of all divided by their number; a flush takes 580 µs on"
            " `ssd`, a turn of `hdd` 8,300."
        ),
        "columns": ["block", "writers", *ways, "ratio", "spread", "µs more for each write and flush"],
        "rows": rows,
    }
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {"samples": samples.raw(), "tables": [table], "goals": [], "figures": [], "notes": notes}
