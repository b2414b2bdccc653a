"""Synchronous writes: fio, a flush behind each write, by request size, writers, pattern, and where the image lies."""

import contextlib

from isobath_bench.embedded import loads

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Baseline, Cause, compared
from . import common
from .common import EMBEDDED, JOURNAL, QEMU, RAW

NAME = "sync_writes"
TITLE = "Synchronous writes"
SOURCE = "Selfie, figures 5, 6 and 7"

KIB = 1 << 10
SEQUENTIAL, RANDOM = "sequential", "random"
# Where the image lies, and the pattern, of each figure; the last is not in the paper.
FIGURES = {
    5: ("hdd", SEQUENTIAL),
    6: ("hdd", RANDOM),
    7: ("hdd ext4", SEQUENTIAL),
    "ssd": ("ssd", SEQUENTIAL),
    "ssd ext4": ("ssd ext4", SEQUENTIAL),
}
TITLES = {
    5: "Sequential, the image on a volume (hdd)",
    6: "Random, the image on a volume (hdd)",
    7: "Sequential, the image a file on ext4 (hdd)",
    "ssd": "Sequential, the image on a volume (ssd)",
    "ssd ext4": "Sequential, the image a file on ext4 (ssd)",
}
SIZE = 256 << 30
# Of that, what is written to at random.
RANDOM_PART = 32 << 30
# MB/s of one writer of 64 KiB on a logical volume (section 3.1), and of large requests at their best.
SMALL = {QEMU: 3.5, EMBEDDED: 6.0, RAW: 6.0}
LARGE = {EMBEDDED: 33.0, RAW: 80.0}


def cases(profile, figure):
    """Request sizes in KiB, with their numbers of writers."""
    if profile.quick:
        return [(64, 2), (4096, 1)] if figure == 5 else [(64, 2)]
    if isinstance(figure, str):
        return [(64, 1), (64, 16)]
    if figure != 5:
        return [(64, 1), (64, 16), (512, 16), (4096, 8)]
    return [(64, 1), (64, 4), (64, 16), (512, 1), (512, 16), (4096, 1), (4096, 8)]


def who(figure):
    """A raw disk is none of a file system's."""
    return [EMBEDDED, JOURNAL, QEMU] if "ext4" in FIGURES[figure][0] else [EMBEDDED, JOURNAL, QEMU, RAW]


def points(profile):
    return [
        Point(
            (figure, kib, writers, contender),
            seconds=profile.of(0.6, 3.8 if figure == 7 else 1.8),
        )
        for figure in FIGURES
        for kib, writers in cases(profile, figure)
        for contender in who(figure)
    ]


def time_of(profile, figure):
    """How long fio writes, as it takes it. Zeroes that isobath writes ahead on a file system need longer to be made use
    of."""
    return profile.of("200ms", "3s" if figure == 7 else "1s")


class Setting(common.Places):
    """How many writes; the places."""

    def __init__(self, profile, stack):
        super().__init__(stack)
        self.profile = profile
        # Writes of one measurement at most.
        self.most = profile.of(80, 8_000)


@contextlib.contextmanager
def setting(profile):
    with contextlib.ExitStack() as stack:
        yield Setting(profile, stack)


def measure(setting, point, number):
    """Fields: `bytes_per_second` of all writers together; for each write what the disk was sent."""
    figure, kib, writers, contender = point.key
    name, pattern = FIGURES[figure]
    block = kib * KIB
    if pattern == SEQUENTIAL:
        where = loads.sequential(SIZE, block, writers, setting.most)
    else:
        where = [
            [at // block * block for at in each]
            for each in loads.scattered(RANDOM_PART, loads.CLUSTER, writers, setting.most, number, within=0)
        ]
    with common.fresh(contender, setting.place(name), SIZE) as disk:
        loads.write_and_flush(disk.server, [each[:4] for each in where], block)
        before = disk.sent()
        done = loads.write_and_flush(disk.server, [each[4:] for each in where], block, time_of(setting.profile, figure))
        sent = common.difference(disk.sent(), before, max(done["flushes"], 1))
    return {"bytes_per_second": done["bytes_per_second"], "writes": done["flushes"], "cpu_us": done["cpu_us"], **sent}


def rate(results, *key):
    """MB/s."""
    value = results.median(key, "bytes_per_second")
    return value and value / 1e6


def figure_of(results, figure):
    """A panel for each request size: MB/s over writers."""
    sizes = {}
    for kib, writers in cases(results.profile, figure):
        sizes.setdefault(kib, []).append(writers)
    name = f"fig{figure}" if isinstance(figure, int) else f"sync-{figure.replace(' ', '-')}"
    with figures.drawn(results, name, TITLES[figure], columns=len(sizes)) as (_, axes):
        for each, (kib, writers) in zip(axes, sizes.items(), strict=True):
            series = {
                contender: [(count, rate(results, figure, kib, count, contender)) for count in writers]
                for contender in who(figure)
            }
            paper = {contender: [(1, value)] for contender, value in SMALL.items()} if (figure, kib) == (5, 64) else {}
            figures.plot_lines(each, series, paper)
            figures.decorate(each, "writers", "MB/s", log_x=max(writers) > 1 and len(writers) > 1, ticks=writers)
            each.set_title(f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB", fontsize=9)
    return figures.saved(results, name, TITLES[figure])


def table_of(results, figure):
    rows = []
    for kib, writers in cases(results.profile, figure):
        for contender in who(figure):
            key = (figure, kib, writers, contender)
            rows.append(
                [
                    f"{kib} KiB",
                    writers,
                    contender,
                    results.text(key, "bytes_per_second", "{:,.2f}", 1e-6),
                    results.spread_text(key, "bytes_per_second"),
                    results.text(key, "reads_each", "{:,.2f}"),
                    results.text(key, "writes_each", "{:,.2f}"),
                    results.text(key, "flushes_each", "{:,.2f}"),
                    results.text(key, "bytes_written_each", "{:,.0f}", 1 / KIB),
                ]
            )
    columns = ["request", "writers", "server", "MB/s", "spread", "disk's reads", "writes", "flushes", "KiB"]
    return Table(
        TITLES[figure], columns, rows, "The last four: what the disk was sent for each write and flush of a writer."
    )


def verdict(results, what, paper, one, other, better="higher", why="", form="{:.2f}x", **more):
    """A ratio of two points' rates."""
    return compared(results, what, paper, one, other, "bytes_per_second", better, why, form, **more)


def section(results):
    def case(figure, large=False):
        found = cases(results.profile, figure)
        return found[-1] if large else found[0]

    def sent(key):
        """What the disk was sent for each write, as text."""
        each = [results.text(key, f"{what}_each", "{:.2f}") for what in ("reads", "writes", "flushes")]
        return "{} reads, {} writes, {} flushes, {} KiB".format(
            *each, results.text(key, "bytes_written_each", "{:,.0f}", 1 / KIB)
        )

    small, large = case(5), case(5, large=True)
    many = [each for each in cases(results.profile, 5) if each[0] == 64][-1]
    few = (
        f"for each write QEMU 7.2 sends the disk {sent((5, *small, QEMU))}, embedded {sent((5, *small, EMBEDDED))}: a"
        " turn of the disk for each flush is what counts"
    )
    zones = f"the raw disk is sent {sent((5, *large, RAW))} for each write, embedded {sent((5, *large, EMBEDDED))}"
    scattered = (
        f"the first write to each 512 MiB needs a table of its own, by way of the journal, and tables are read: "
        f"{sent((6, *many, EMBEDDED))} for each write instead of {sent((5, *many, EMBEDDED))}"
    )
    ahead = (
        f"on a file system isobath writes zeroes ahead of use, as Selfie does everywhere: {sent((7, *small, EMBEDDED))}"
        f" for each write instead of {sent((5, *small, EMBEDDED))}"
    )
    by_itself = "figure 5: one writer of 64 KiB, embedded ÷ raw"
    verdicts = [
        verdict(
            results,
            "figure 5: one writer of 64 KiB, embedded ÷ QEMU",
            SMALL[EMBEDDED] / SMALL[QEMU],
            (5, *small, EMBEDDED),
            (5, *small, QEMU),
            why=few,
            baseline=Baseline(
                "one writer of 64 KiB, the raw disk's rate ÷ QEMU's",
                SMALL[RAW] / SMALL[QEMU],
                results.ratio((5, *small, RAW), (5, *small, QEMU), "bytes_per_second"),
                by_itself,
            ),
        ),
        verdict(
            results,
            by_itself,
            SMALL[EMBEDDED] / SMALL[RAW],
            (5, *small, EMBEDDED),
            (5, *small, RAW),
            why=f"the raw disk is sent {sent((5, *small, RAW))} for each write",
        ),
        verdict(
            results,
            "figure 5: large requests, embedded ÷ raw",
            LARGE[EMBEDDED] / LARGE[RAW],
            (5, *large, EMBEDDED),
            (5, *large, RAW),
            why=zones,
        ),
        verdict(
            results,
            f"figure 5: {many[1]} writers of 64 KiB, embedded ÷ QEMU (the paper: 2 to 8 times in all)",
            8.0,
            (5, *many, EMBEDDED),
            (5, *many, QEMU),
            why=few,
        ),
        verdict(
            results,
            "figure 6 ÷ figure 5: embedded does not slow down where writes are random",
            1.0,
            (6, *many, EMBEDDED),
            (5, *many, EMBEDDED),
            why=scattered,
            cause=Cause.OURS,
        ),
        verdict(
            results,
            f"figure 6: {many[1]} writers of 64 KiB at random, embedded ÷ QEMU (the paper: at least)",
            2.0,
            (6, *many, EMBEDDED),
            (6, *many, QEMU),
            why=scattered,
        ),
        verdict(
            results,
            "figure 7 ÷ figure 5: embedded keeps its throughput on ext4, one writer",
            1.0,
            (7, *small, EMBEDDED),
            (5, *small, EMBEDDED),
            why=ahead,
            cause=Cause.OURS,
        ),
        verdict(
            results,
            f"figure 7: on ext4, {many[1]} writers of 64 KiB, embedded ÷ QEMU (the paper: at least)",
            2.0,
            (7, *many, EMBEDDED),
            (7, *many, QEMU),
            why=ahead,
        ),
    ]
    length = results.profile.of("0.2 s", "one second (three on ext4)")
    parts = []
    for figure in FIGURES:
        parts += [figure_of(results, figure), table_of(results, figure)]
    return Section(
        paper=(
            "fio's threads write synchronously, a flush behind each write, each in a part of its own (figures 5 and 7)"
            " or anywhere in 300 GB (figure 6), 64 KiB, 512 KiB or 4 MiB at a time. One thread of 64 KiB gets 3.5 MB/s"
            " of QCOW2 and about 6 MB/s of Selfie and the bare disk; Selfie grows with the threads and ends at about 33"
            " MB/s, since it clears zones before use; the bare disk reaches 80 MB/s. On ext4 Selfie keeps its"
            " throughput, QCOW2 loses much."
        ),
        ours=(
            f"The same loads over NBD, on a disk of {SIZE >> 30} GiB (the paper: 300 GB; at random in"
            f" {RANDOM_PART >> 30} GiB of it, for the shorter time), a new image for each measurement of {length}, data"
            f" that compresses. {common.ON_VOLUMES} {common.PEERS} The paper prints few of the figures' values: those"
            " are drawn pale. The SSD is ours: the paper has these figures of the hard disk only."
        ),
        parts=parts,
        verdicts=verdicts,
    )
