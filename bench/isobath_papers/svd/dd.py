"""Figure 15: dd of the whole disk, over the number of layers."""

import contextlib
import re

from isobath_bench import tools

from ..page import Section, Table
from ..plan import Point
from ..stage import disks
from ..verdict import compared
from . import passes, places
from .passes import INDEXED, ISOBATH
from .places import CACHED, NFS

NAME = "dd"
TITLE = "dd over the number of layers"
SOURCE = "SVD, figure 15"

# Raw data of the authors' published notebook: MB/s by snapshots.
PAPER = {
    "QEMU": {0: 519.2, 1: 330.0, 50: 305.0, 500: 105.7, 1000: 48.6},
    "SVD": {0: 553.5, 1: 351.0, 50: 315.8, 500: 310.5, 1000: 301.5},
}
WHY_QEMU = (
    "QEMU 7.2 falls off faster than the paper's: at each layer that a read passes it asks of every layer below whether"
    " it is there (`bdrv_is_inserted`, which has most of its time in a profile of 1,001 layers), so that a read's time"
    " grows with the square of the layers."
)
# What a guest's kernel reads ahead, unless it is told otherwise: in sectors.
READ_AHEAD = 256


def snapshots(profile):
    return profile.of([0, 1, 20], list(PAPER["SVD"]))


def disk_bytes(profile):
    return profile.of(32 << 20, 512 << 20)


def box(profile):
    """Seconds after which dd is ended."""
    return profile.of(1, 8)


def points(profile):
    found = []
    for where in (NFS, CACHED):
        for count in snapshots(profile):
            slow = count >= 500
            for who in (INDEXED, passes.qemu()):
                found.append(
                    Point(
                        (where, who, count),
                        seconds=profile.of(0.8, 12 if slow and who != INDEXED else 4),
                    )
                )
    deepest = snapshots(profile)[-1]
    return [*found, Point((NFS, ISOBATH, deepest), seconds=profile.of(0.8, 5))]


@contextlib.contextmanager
def setting(profile):
    actives = {
        count + 1: passes.chain(ISOBATH, count + 1, disk_bytes(profile), data="random") for count in snapshots(profile)
    }
    with places.on_nfs(actives) as nfs:
        yield {NFS: nfs, CACHED: places.in_page_cache(actives), "box": box(profile)}


def measure(setting, point, number):
    del number
    where, who, count = point.key
    place = setting[where]
    image = place.reading(who, count + 1)
    with disks.serve(ISOBATH if passes.own(who) else who, image, cache=place.cache, writable=False) as disk:
        with disks.looped(disk) as device:
            tools.run("blockdev", "--setra", READ_AHEAD, device)
            before = disk.cpu()
            # dd tells of what it has done when it is interrupted, too.
            said = tools.run(
                "sh", "-c", f"timeout --signal=INT {setting['box']} dd if={device} of=/dev/null bs=1M 2>&1 || true"
            )
            found = re.search(r"(\d+) bytes.* copied, ([\d.e+-]+) s", said)
            if not found or not int(found[1]):
                raise tools.Failed(f"{who}: dd has read nothing: {said[-500:]}")
            done, seconds = int(found[1]), float(found[2])
            return {
                "mb_per_second": done / seconds / 1e6,
                "bytes": done,
                "cpu_us_per_mib": (disk.cpu() - before) / (done / 2**20) * 1e6,
            }


def section(results):
    qemu, profile = passes.qemu(), results.profile
    counts = snapshots(profile)
    names = (INDEXED, qemu)
    curves = {
        where: {
            who: [(count, results.median((where, who, count), "mb_per_second")) for count in counts] for who in names
        }
        for where in (NFS, CACHED)
    }
    paper = {who: list(PAPER[who].items()) for who in PAPER}
    figure = places.panels(
        results,
        "fig15",
        "dd of the whole disk",
        curves,
        paper,
        "snapshots",
        "MB/s",
        [0, 1, 10, 50, 200, 1000],
        log_x=True,
        log_y=True,
    )
    rows = []
    for where in (NFS, CACHED):
        for who in (INDEXED, ISOBATH, qemu):
            keys = [(where, who, count) for count in counts]
            if any(results.samples(key) or results.failure(key) for key in keys):
                rows.append(
                    [
                        where,
                        who,
                        *(results.text(key, "mb_per_second", "{:,.4g}") for key in keys),
                        *(results.text(keys[at], "cpu_us_per_mib") for at in (0, -1)),
                    ]
                )
    columns = [
        "disk",
        "server",
        *(f"{count:,} snapshot{'s' * (count != 1)}" for count in counts),
        "CPU µs/MiB, none",
        f"CPU µs/MiB, {counts[-1]:,}",
    ]
    table = Table(
        "MB/s, and the server's CPU time for a MiB",
        columns,
        rows,
        text=f"What was not through after {box(profile)} s was ended.",
    )
    verdicts = []
    for count in counts:
        paper = PAPER["SVD"][count] / PAPER["QEMU"][count] if count in PAPER["SVD"] else None
        verdicts.append(
            compared(
                results,
                f"dd, {count:,} snapshots: SVD ÷ QEMU",
                paper,
                (NFS, INDEXED, count),
                (NFS, qemu, count),
                "mb_per_second",
            )
        )
    paper, ends = PAPER["SVD"][1000] / PAPER["SVD"][0], [(NFS, INDEXED, counts[at]) for at in (-1, 0)]
    verdicts.append(compared(results, f"dd: SVD, {counts[-1]:,} snapshots ÷ none", paper, *ends, "mb_per_second"))
    return Section(
        paper=(
            "`dd` in the guest reads a disk of 50 GB, 90 % full of random data, by 4 MiB. QEMU loses 91 % of its speed"
            " from no snapshot to 1,000, SVD 46 %."
        ),
        ours=(
            "`dd` of a loop device, with the 128 KiB of read-ahead that a guest has, on the disk as a file by nbdfuse."
            f" {disk_bytes(profile) / 2**30:.3g} GiB instead of 50, 90 % of it random data whose clusters belong to"
            " random layers; *n* snapshots are *n* + 1 layers. All caches have the size that the servers choose, which"
            f" holds all tables. {places.ABOUT_NFS} Beside it on the page cache. {passes.ABOUT_CONTENDERS}"
        ),
        parts=[figure, table, WHY_QEMU],
        verdicts=verdicts,
    )
