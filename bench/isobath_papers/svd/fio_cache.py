"""Figures 16 and 17: random reads, and reads and writes, with more and more memory for tables, on 500 layers."""

import contextlib

from isobath_bench import fio

from ..page import Section, Table
from ..plan import Point
from ..stage import disks
from ..verdict import compared
from . import passes, places
from .passes import INDEXED, ISOBATH
from .places import CACHED, NFS

NAME = "fio_cache"
TITLE = "fio over the size of the caches"
SOURCE = "SVD, figures 16 and 17"

# Raw data of the authors' published notebook: KB/s over MB of cache in all.
PAPER_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
PAPER = {
    ("read", "QEMU"): [88, 393, 456, 376, 402, 431, 411, 508, 678, 988, 1088, 1178, 1228],
    ("read", "SVD"): [2850, 3000, 3050, 4323, 4426, 5208, 5553, 5373, 5150, 5418, 5387, 5700, 6000],
    ("mixed", "QEMU"): [76, 146, 145, 132, 144, 148, 147, 197, 251, 272, 239, 266, 265],
    ("mixed", "SVD"): [1352, 1428, 1475, 1592, 1719, 1889, 1966, 1915, 1899, 2016, 1965, 1892, 1967],
}
PAPER_DISK = 50 << 30
LOADS = {
    "read": ("fig16", "4 KiB reads", "randread", []),
    "mixed": ("fig17", "4 KiB, 70 % reads and 30 % writes", "randrw", ["--rwmixread=70"]),
}
# The disk and all caches are so much smaller than the paper's.
SCALE = 16
SIZES = {"read": [1, 32, 128, 512, 4096], "mixed": [1, 128, 4096]}
SMALLEST, LARGEST = 1, 4096
# Of a table's cached part QEMU takes 4 KiB, and keeps two parts at least.
QEMU_LEAST = 2 * 4096


def layers(profile):
    return profile.of(20, 500)


def disk_bytes(profile):
    return profile.of(64 << 20, PAPER_DISK // SCALE)


def points(profile):
    qemu = passes.qemu()
    found = []
    for load in LOADS:
        for size in profile.of([SMALLEST], SIZES[load]):
            found += [
                Point((NFS, load, who, size), seconds=profile.of(1.5, 5 if passes.own(who) else 11))
                for who in (INDEXED, qemu)
            ]
        for size in profile.of([], [SMALLEST, LARGEST]):
            found += [Point((CACHED, load, who, size), seconds=6) for who in (INDEXED, qemu)]
    found += [
        Point((NFS, "read", ISOBATH, size), seconds=profile.of(1.5, 5))
        for size in profile.of([SMALLEST], [SMALLEST, LARGEST])
    ]
    return found


@contextlib.contextmanager
def setting(profile):
    count = layers(profile)
    actives = {count: passes.chain(ISOBATH, count, disk_bytes(profile), data="random")}
    with places.on_nfs(actives) as nfs:
        yield {NFS: nfs, CACHED: places.in_page_cache(actives), "layers": count, "seconds": profile.of(1, 4)}


def measure(setting, point, number):
    del number
    where, load, who, size = point.key
    place, count = setting[where], setting["layers"]
    total = (size << 20) // SCALE
    _, _, rw, more = LOADS[load]
    warm_up = setting["seconds"] // 2
    with place.fresh(who, count) as image, served(who, image, total, count, place.cache) as disk:
        extra = ["--percentage_random=70", f"--ramp_time={warm_up}", *more]
        done = fio.load(disk, rw=rw, block="4k", depth=32, seconds=setting["seconds"] - warm_up, extra=extra)
        return {"kib_per_second": done["bytes_per_second"] / 1024, "requests": done["requests"], "rss": disk.rss()}


def served(who, image, total, count, cache):
    """A disk whose caches are of `total` bytes together."""
    if passes.own(who):
        return disks.isobath(image, "--map-cache", str(total), cache=cache, name=who)
    return disks.qemu(image, cache=cache, l2_cache=max(total // count, 1), name=who)


def section(results):
    qemu = passes.qemu()
    profile = results.profile
    parts, verdicts = [], []
    for load, (name, what, *_) in LOADS.items():
        paper = {who: dict(zip(PAPER_SIZES, PAPER[load, who], strict=True)) for who in ("SVD", "QEMU")}
        curves = {where: {who: curve(results, where, load, who) for who in (INDEXED, qemu)} for where in (NFS, CACHED)}
        parts.append(
            places.panels(
                results,
                name,
                f"{what}, {layers(profile)} layers",
                curves,
                {who: list(each.items()) for who, each in paper.items()},
                "MiB of cache in all, for a disk of 50 GiB",
                "KiB/s of reads",
                [1, 8, 64, 512, 4096],
                log_x=True,
                log_y=True,
            )
        )
        for size, _ in curves[NFS][INDEXED]:
            ratio, keys = paper["SVD"][size] / paper["QEMU"][size], [(NFS, load, who, size) for who in (INDEXED, qemu)]
            verdicts.append(
                compared(results, f"{what}, {size:,} MiB of cache: SVD ÷ QEMU", ratio, *keys, "kib_per_second")
            )
    parts.append(table(results, qemu))
    paper, keys = (
        dict(zip(PAPER_SIZES, PAPER["read", "SVD"], strict=True)),
        [(NFS, "read", INDEXED, size) for size in (32, LARGEST)],
    )
    verdicts.append(
        compared(
            results, "4 KiB reads: SVD, 32 MiB of cache ÷ 4 GiB", paper[32] / paper[LARGEST], *keys, "kib_per_second"
        )
    )
    return Section(
        paper=(
            "4 KiB requests, 70 % of them at random places, 32 under way, on a disk of 50 GB with 500 layers, while all"
            " caches together have 1 MiB to 4 GiB: QEMU gets a 500th for each layer. SVD is 5 to 32 times as fast for"
            " reads, 7 to 18 times with writes, and has most of it from 32 MiB on."
        ),
        ours=(
            f"`percentage_random=70`, queue depth 32 over NBD, {layers(profile)} layers. Disk and caches are a"
            f" {SCALE}th of the paper's ({disk_bytes(profile) / 2**30:.3g} GiB, 90 % of it random data); sizes are told"
            f" as the paper's. {places.ABOUT_NFS} On the page cache beside it a miss costs only CPU. QEMU keeps at"
            f" least two parts of 4 KiB for each layer, which is {QEMU_LEAST * layers(profile) * SCALE >> 20} MiB here"
            f" as sizes are told: below that its caches do not get smaller. {passes.ABOUT_CONTENDERS}"
        ),
        parts=parts,
        verdicts=verdicts,
    )


def curve(results, where, load, who):
    """KiB/s over the size of the caches."""
    sizes = sorted(key[3] for key in results.keys() if key[:3] == (where, load, who))
    return [(size, results.median((where, load, who, size), "kib_per_second")) for size in sizes]


def table(results, qemu):
    """All places, and the memory of the servers."""
    rows, sizes = [], sorted({key[3] for key in results.keys()})
    for where in (NFS, CACHED):
        for load in LOADS:
            for who in (INDEXED, ISOBATH, qemu):
                keys = [(where, load, who, size) for size in sizes]
                if any(key in results.keys() for key in keys):
                    memory = (results.text(keys[at], "rss", "{:,.0f}", 2**-20) for at in (0, -1))
                    rows.append(
                        [where, LOADS[load][1], who, *(results.text(key, "kib_per_second") for key in keys), *memory]
                    )
    columns = ["disk", "load", "server", *(f"{size:,} MiB" for size in sizes), "RSS, smallest", "RSS, largest"]
    return Table("KiB/s of reads, and the server's memory in MiB", columns, rows)
