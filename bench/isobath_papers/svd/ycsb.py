"""Figures 13 and 14: YCSB on RocksDB in a guest, on 50 and 500 layers."""

import contextlib

from isobath_bench import tools
from isobath_bench.depth import chains
from isobath_bench.flush import mounts

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import disks, memory
from ..stage import ycsb as load
from ..verdict import compared
from . import passes, places
from .passes import INDEXED

NAME = "ycsb"
TITLE = "YCSB on RocksDB"
SOURCE = "SVD, figures 13 and 14"

# Raw data of the authors' published notebook: operations a second by workload, layers, KiB of cache.
PAPER = {
    ("c", 50, 1792): {"QEMU": 3441, "SVD": 4583},
    ("c", 500, 1792): {"QEMU": 1102, "SVD": 1479},
    ("c", 50, 3584): {"QEMU": 3541, "SVD": 4300},
    ("c", 500, 3584): {"QEMU": 1134, "SVD": 1676},
    ("d", 50, 1792): {"QEMU": 44704, "SVD": 49543},
    ("d", 500, 1792): {"QEMU": 3913, "SVD": 4190},
}
CACHES = [1792, 3584]
LAYERS = [50, 500]
WORKLOADS = {"b": "YCSB-B (5 % updates)", "c": "YCSB-C (reads)", "d": "YCSB-D (reads of the latest, 5 % inserts)"}
# The disk, the database, the guest's memory and the caches are so much smaller than the paper's.
SCALE = 16
PAPER_DISK, PAPER_MEMORY, PAPER_BLOCK_CACHE = 50 << 30, 4 << 30, 8 << 20
# A record with its key and RocksDB's own takes about so many bytes.
RECORD = 1184


def disk_bytes(profile):
    return profile.of(256 << 20, PAPER_DISK // SCALE)


def records(profile):
    """A quarter of the disk."""
    return disk_bytes(profile) // 4 // RECORD


def layers(profile):
    return profile.of([20], LAYERS)


def seconds(profile):
    """Of a run."""
    return profile.of(0.4, 4)


def points(profile):
    qemu, found = passes.qemu(), []
    for count in layers(profile):
        cases = [("c", CACHES[0]), ("d", CACHES[0])]
        cases += profile.of([], [("c", CACHES[1])]) + ([("b", CACHES[0])] if count == layers(profile)[0] else [])
        for workload, cache in cases:
            for who in (INDEXED, qemu):
                full = 6 if passes.own(who) else 6 + count / 30
                found.append(Point((workload, who, count, cache), seconds=profile.of(1.5, full)))
    return found


@contextlib.contextmanager
def setting(profile):
    actives = {count: chain(count, profile) for count in layers(profile)}
    with places.on_nfs(actives) as nfs:
        yield {"place": nfs, "records": records(profile), "seconds": seconds(profile)}


def chain(count, profile):
    """A chain of the disk with the database, each of its clusters in a random layer."""
    name = f"ycsb-{disk_bytes(profile) >> 20}M"
    raw, directory = tools.WORK / f"{name}.raw", tools.WORK / f"{name}-{count}-layers"

    def generate():
        if not raw.exists():
            database(raw, profile)
        chains.generate(directory, count, "--data", f"raw:{raw}")

    return chains.kept(directory, count, generate)


def database(raw, profile):
    """A disk image with ext4 and the loaded database."""
    new = raw.with_suffix(".new")
    new.unlink(missing_ok=True)
    tools.run("truncate", f"--size={disk_bytes(profile)}", new)
    with mounts.attached(new, make=disks.MAKE) as (_, directory):
        load.run("load", directory / "db", records=records(profile), threads=2)
    new.rename(raw)


def measure(setting, point, number):
    workload, who, count, kibibytes = point.key
    cache = (kibibytes << 10) // SCALE
    with (
        setting["place"].fresh(who, count) as image,
        serve(who, image, cache) as disk,
        disks.mounted(disk, make=None) as system,
    ):
        with memory.limited(PAPER_MEMORY // SCALE) as limit:
            before = setting["place"].device.requests()
            done = load.run(
                "run",
                system.directory / "db",
                prefix=limit.prefix,
                records=setting["records"],
                workload=workload,
                seconds=setting["seconds"],
                cache_bytes=PAPER_BLOCK_CACHE // SCALE,
                seed=number + 1,
            )
            reads = (setting["place"].device.requests() - before)["reads"] / max(done["operations"], 1)
        return {
            "ops_per_second": done["ops_per_second"],
            "read_us": done["read"]["mean_us"],
            "read_p99_us": done["read"]["p99"],
            "device_reads": reads,
            "rss": disk.rss(),
        }


def serve(who, image, cache):
    """A disk with so many bytes of cache: all of isobath's, QEMU's for each layer."""
    if passes.own(who):
        return disks.isobath(image, "--map-cache", str(cache), cache="none", name=who)
    return disks.qemu(image, cache="none", l2_cache=cache, name=who)


def section(results):
    qemu, profile = passes.qemu(), results.profile
    cases = list(dict.fromkeys((key[0], *key[2:]) for key in results.keys()))

    def key(who, case):
        return (case[0], who, *case[1:])

    def name(case):
        return f"{case[0].upper()}, {case[1]}, {case[2]}K"

    shown = [
        "operations/s",
        "µs a read",
        "99 % within, µs",
        "reads of the file server an operation",
        "RSS of the server, MiB",
    ]
    groups = {
        name(case): {who: results.median(key(who, case), "ops_per_second") for who in (INDEXED, qemu)}
        for case in sorted(cases)
    }
    figure = figures.bars(
        results,
        "fig13",
        "YCSB: workload, layers, size of the cache as the paper's",
        "operations a second",
        groups,
        log=True,
        form="{:,.0f}",
        paper={name(case): {who: PAPER[case][who] for who in ("SVD", "QEMU")} for case in sorted(PAPER)},
    )
    rows = [
        [
            WORKLOADS[case[0]],
            f"{case[1]}",
            f"{case[2] / SCALE:.0f} KiB",
            who,
            *(results.text(key(who, case), field) for field in ("ops_per_second", "read_us", "read_p99_us")),
            results.text(key(who, case), "device_reads", "{:,.1f}"),
            results.text(key(who, case), "rss", "{:,.0f}", 2**-20),
        ]
        for case in sorted(cases)
        for who in (INDEXED, qemu)
    ]
    verdicts = []
    for case in sorted(cases):
        paper = PAPER[case]["SVD"] / PAPER[case]["QEMU"] if case in PAPER else None
        what = f"{WORKLOADS[case[0]].split(' (')[0]}, {case[1]} layers, {case[2]}K of cache: SVD ÷ QEMU"
        why = "" if case in PAPER else "the paper gives no figures of it"
        verdicts.append(compared(results, what, paper, key(INDEXED, case), key(qemu, case), "ops_per_second", why=why))
    return Section(
        paper=(
            "RocksDB on a quarter of a disk of 50 GB in a guest with 4 GB of memory, 500,000 requests of YCSB. SVD"
            " answers a fifth to a half more of YCSB-C's requests than QEMU, and 7 to 11 % more of YCSB-D's, most of"
            " which the guest's memory answers."
        ),
        ours=(
            "RocksDB by its C API with the load of our own generator (YCSB's definition: 10 fields of 100 B; one"
            " thread) on ext4 on a loop device on the disk as a file by nbdfuse; a memory cgroup is the guest's"
            f" memory. Disk, database, memory and caches are a {SCALE}th of the paper's:"
            f" {disk_bytes(profile) / 2**30:.3g} GiB, {records(profile):,} records, {PAPER_MEMORY // SCALE >> 20} MiB,"
            f" {CACHES[0] // SCALE} and {CACHES[1] // SCALE} KiB. The database's clusters belong to random layers. Runs"
            f" begin with all caches empty, the guest's too, and end after {seconds(profile)} s: more of the requests"
            " reach the disk than in the paper's long runs, so layers cost more. The paper does not say how it splits"
            " the size over QEMU's caches: here each layer of QEMU's chain has that much, isobath has it once."
            f" {places.ABOUT_NFS} *isobath indexed* is a chain whose active layer holds the direct-access index."
        ),
        parts=[figure, Table("Operations", ["workload", "layers", "cache", "server", *shown], rows)],
        verdicts=verdicts,
    )
