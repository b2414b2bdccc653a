"""What it gains to keep the mapping of a new cluster in its data: writes with a flush behind each, reads, CPU,
recovery, applications. `--metadata embedded` beside isobath's other ways, QEMU and a raw file, on simulated
disks (`hdd`: 7,200 turns a minute, 100 MB/s; `ssd`: 250 MB/s, 500 µs a flush) and on a file system."""

from isobath_bench import scenario
from isobath_bench.embedded import apps, cpu, dd, hop, read, recovery, requests
from isobath_bench.embedded.sync import Sync

PARTS = {
    "requests": requests,
    "hop": hop,
    "sync_hdd": Sync("hdd"),
    "sync_ssd": Sync("ssd"),
    "sync_ext4": Sync("ext4"),
    "sync_xfs": Sync("XFS"),
    "incompressible_hdd": Sync("hdd", "incompressible"),
    "incompressible_ssd": Sync("ssd", "incompressible"),
    "incompressible_ext4": Sync("ext4", "incompressible"),
    "read": read,
    "cpu": cpu,
    "dd": dd,
    "apps": apps,
    "recovery": recovery,
}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
