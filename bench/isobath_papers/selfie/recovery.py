"""How long a disk takes to be ready again after its server was killed, by its size."""

import contextlib

from isobath_bench import fio, servers, tools
from isobath_bench.embedded import contenders, loads, places

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Cause, Verdict
from . import common
from .common import EMBEDDED, JOURNAL, QEMU

NAME = "recovery"
TITLE = "Recovery"
SOURCE = "Selfie, figure 10"

NOTHING = "isobath embedded, nothing collected"
ON_SSD = "isobath embedded, on the SSD"
LAZY = "QEMU, lazy refcounts"
# No zone is ever sealed: all mappings are found in the data.
ALL_OPEN = ("--zones", "4096")
# Writes between two flushes: mappings of more than 64 new clusters are not put into the data.
BATCH = 48
# Seconds for 128 GB (section 3.3): mappings in the data alone, those of a zone together, those of eight.
PAPER = {"none": 21 * 60, "1 zone": 11.6, "8 zones": 1.9}
PAPER_GIB = 128


def sizes(profile):
    """GiB of each case."""
    if profile.quick:
        return {
            NOTHING: [0.0625],
            EMBEDDED: [0.0625],
            ON_SSD: [0.0625],
            JOURNAL: [0.0625],
            LAZY: [0.0625],
            QEMU: [0.0625],
        }
    return {NOTHING: [0.5, 1], EMBEDDED: [0.5, 1, 2, 8, 32], ON_SSD: [8], JOURNAL: [8], LAZY: [2, 8], QEMU: [8]}


def points(profile):
    # A gibibyte takes about a second to be filled; that, or eight zones, some twenty to be scanned.
    return [
        Point(
            (case, size),
            seconds=1
            + size
            + (20 * min(size, 0.5 if case == EMBEDDED else size) if case in (NOTHING, EMBEDDED) else 1),
        )
        for case, each in sizes(profile).items()
        for size in each
    ]


@contextlib.contextmanager
def setting(profile):
    del profile
    with common.place("hdd") as hdd, common.place("ssd") as ssd:
        yield {"hdd": hdd, "ssd": ssd}


def fill(server, size, batch):
    """Writes 4 KiB to each cluster, in order, with a flush behind so many of them, or one at the end."""
    count = size // loads.CLUSTER
    extra = [
        *loads.COMPRESSIBLE,
        *([f"--fsync={batch}"] if batch else []),
        "--end_fsync=1",
        f"--size={size}",
        f"--io_size={count * 4096}",
    ]
    done = fio.load(server, rw="write:60k", block="4k", depth=BATCH, seconds=3600, once=True, extra=extra)
    if done["requests"] != count:
        raise tools.Failed(f"{done['requests']:,} of {count:,} clusters were written")


def crashed(case, place, size):
    """An image each of whose clusters was written and flushed, whose server was killed."""
    path = place.directory / "disk"
    path.unlink(missing_ok=True)
    contenders.make_qcow2(path, size, None, "lazy_refcounts=on" if case == LAZY else "")
    if case in (LAZY, QEMU):
        serving = servers.qemu_nbd(path)
    else:
        mode = "journal" if case == JOURNAL else "embedded"
        serving = servers.isobath(
            path, "--metadata", mode, "--slow-disk", places.FREE, *(ALL_OPEN if case == NOTHING else ())
        )
    with serving as server:
        fill(server, size, None if case in (LAZY, QEMU) else BATCH)
        server.process.kill()
        server.process.wait()
    if case in (LAZY, QEMU):
        tools.run("truncate", f"--size={path.stat().st_size + (64 << 20)}", path)
    return path


def measure(setting, point, number):
    """Fields: `seconds` from the start of the next server until it greets a client; its most memory, in bytes; what the
    disk was sent meanwhile."""
    del number
    case, gib = point.key
    place = setting["ssd" if case == ON_SSD else "hdd"]
    path = crashed(case, place, int(gib * 2**30))
    name = {NOTHING: EMBEDDED, ON_SSD: EMBEDDED, LAZY: QEMU}.get(case, case)
    try:
        with common.served(name, path, place, patience=1200) as disk:
            found = {"seconds": disk.server.ready, "rss": disk.server.peak_rss(), **disk.sent()}
            disk.server.process.kill()
            disk.server.process.wait()
        return found
    finally:
        path.unlink()


def section(results):
    profile = results.profile
    series = {
        case: [(size, results.median((case, size), "seconds")) for size in each]
        for case, each in sizes(profile).items()
    }
    paper = {f"Selfie, {case} collected": [(PAPER_GIB, seconds)] for case, seconds in PAPER.items()}
    with figures.drawn(results, "fig10", "Ready again after a crash") as (_, [axes]):
        figures.plot_lines(axes, series, paper)
        figures.decorate(axes, "disk, GiB", "s", log_x=True, log_y=True)
    rows = [
        [
            case,
            f"{size:g}",
            results.text((case, size), "seconds", "{:.3f}"),
            results.text((case, size), "reads"),
            results.text((case, size), "writes"),
            results.text((case, size), "rss", "{:,.0f}", 2**-20),
        ]
        for case, each in sizes(profile).items()
        for size in each
    ]
    large, scanned = sizes(profile)[EMBEDDED][-1], sizes(profile)[NOTHING][-1]
    ready, fast = (
        results.median((EMBEDDED, large), "seconds"),
        results.median((ON_SSD, sizes(profile)[ON_SSD][-1]), "seconds"),
    )
    each = results.median((NOTHING, scanned), "seconds")
    whole = each and each * PAPER_GIB / scanned
    checked = sizes(profile)[LAZY][-1]
    lazy = results.ratio((LAZY, checked), (EMBEDDED, checked), "seconds")
    requests = (
        "{} reads and {} writes of 512 bytes or 4 KiB, each in a cluster of its own, before the disk is ready".format
    )
    some, all_of_them = (
        requests(results.text(key, "reads"), results.text(key, "writes"))
        for key in ((EMBEDDED, large), (NOTHING, scanned))
    )
    in_use = (
        f"the zones in use are looked at cluster by cluster and made plain qcow2 again, the same for any size: {some},"
        " and the disk turns"
    )
    return Section(
        paper=(
            "An image is filled by dd with data that compresses, then recovered. The time is proportional to the"
            " image's size; 128 GB take 21 minutes if all mappings are in the data, 11.6 s if those of a zone are"
            " collected in a cluster, 1.9 s if those of eight are."
        ),
        ours=(
            f"4 KiB are written to each cluster of a new disk, with a flush behind each {BATCH} (QEMU: at the end), and"
            " the server is killed; seconds from the start of the next one, on the hard disk, until it greets a"
            " client. Isobath collects mappings in its journal and tables, and leaves eight zones uncollected at most;"
            " *nothing collected* is `--zones 4096`, whose disks have"
            f" {' and '.join(f'{size:g}' for size in sizes(profile)[NOTHING])} GiB. *QEMU* keeps the order of its"
            f" writes and has nothing to recover; with lazy refcounts it checks the whole image. {common.SIMULATED}"
        ),
        parts=[
            figures.saved(results, "fig10", "Ready again after a crash"),
            Table(
                "Recovery", ["server", "disk, GiB", "ready after, s", "disk's reads", "writes", "peak RSS, MiB"], rows
            ),
        ],
        verdicts=[
            Verdict(
                f"embedded, {large:g} GiB: seconds (the paper: 128 GB, a zone's mappings collected)",
                PAPER["1 zone"],
                ready,
                better="lower",
                why=in_use,
                cause=Cause.OURS,
                form="{:,.2f} s",
            ),
            Verdict(
                f"embedded, {large:g} GiB: seconds (the paper: 128 GB, eight zones' collected)",
                PAPER["8 zones"],
                ready,
                better="lower",
                why=in_use,
                cause=Cause.OURS,
                form="{:,.2f} s",
            ),
            Verdict(
                "embedded on the SSD: seconds (the paper: a hard disk, eight zones' collected)",
                PAPER["8 zones"],
                fast,
                better="lower",
                form="{:,.2f} s",
            ),
            Verdict(
                f"nothing collected, {scanned:g} GiB: seconds for each 128 GiB",
                PAPER["none"],
                whole,
                better="lower",
                form="{:,.0f} s",
                why=f"the paper reads all of each zone; here there are {all_of_them}",
                cause=Cause.OURS,
            ),
            Verdict(
                f"nothing collected, taken to 128 GiB, ÷ embedded, {large:g} GiB",
                PAPER["none"] / PAPER["8 zones"],
                whole and ready and whole / ready,
                why=in_use,
                cause=Cause.OURS,
            ),
            Verdict(
                f"QEMU with lazy refcounts ÷ embedded, {checked:g} GiB",
                None,
                lazy,
                form="{:,.2f}x",
                why="the paper does not have it",
            ),
        ],
    )
