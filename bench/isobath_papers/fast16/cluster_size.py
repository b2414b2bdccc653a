"""Clusters of 64 KiB to 2 MiB: synchronous writes, direct writes, and direct writes anywhere over a base."""

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import compared
from . import guests, writes
from .guests import OURS, THEIRS

NAME = "cluster_size"
TITLE = "Large clusters"
SOURCE = "FAST '16, figure 9"

DISK = "ssd"
SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1M": 1 << 20, "2M": 2 << 20}
SYNC, DIRECT, ANYWHERE = LOADS = ["sync write", "direct write", "direct write anywhere over a base"]
UNIT = "MB/s"
BYTES = 160 << 20
# The paper's text: clusters of 2 MiB ÷ those of 64 KiB, both QEMU's.
PAPER_LARGE = 0.5


def points(profile):
    """By contender and size of clusters."""
    return [
        Point((who, size), profile.of(1, 5))
        for size in (["64k", "2M"] if profile.quick else SIZES)
        for who in (OURS, THEIRS)
    ]


def setting(profile):
    del profile
    return guests.stages([DISK], ["file"])


def measure(stages, point, number):
    who, size = point.key
    stage, quick = stages[DISK], tools.QUICK
    path = stage.directory / "clusters.img"
    found = {}
    for load in (SYNC, DIRECT):
        tools.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"cluster_size={size}", path, BYTES)
        try:
            with guests.guest(who, path, guests.MAKE) as guest:
                file = guest.directory / "new"
                if load == SYNC:
                    count, seconds = writes.warmed(file, 0.2 if quick else 1.2, 0.1 if quick else 0.3, BYTES * 3 // 4)
                    amount = count * writes.BLOCK
                else:
                    amount = 4 << 20 if quick else 64 << 20
                    seconds = writes.direct(file, amount)
        finally:
            path.unlink()
            stage.settle()
        found[load] = amount / seconds / 1e6
    amount = 50 if quick else 400
    with guests.overlay(stages, DISK, "file", who, f"cluster_size={size}") as image, guests.guest(who, image) as guest:
        before = stage.requests()
        seconds = writes.scattered(guest.directory / "file", amount, number)
        sent = stage.requests() - before
    return found | {ANYWHERE: amount * 4096 / seconds / 1e6, "sectors_per_write": sent["sectors"] / amount}


def section(results):
    sizes = [size for size in SIZES if (OURS, size) in results.keys()]
    whos = (OURS, THEIRS)
    # As in the paper's figure: both with the default size, and QEMU with the largest.
    bars = {OURS: (OURS, "64k"), THEIRS: (THEIRS, "64k"), "2M cluster (QEMU)": (THEIRS, "2M")}
    paper_like = {load: {label: results.median(key, load) for label, key in bars.items()} for load in LOADS}
    parts = [
        figures.bars(results, "fig9", "Clusters of 64 KiB and of 2 MiB", UNIT, paper_like, log=True),
        Table(
            "Throughput by size of clusters, in MB/s.",
            ["server", "clusters", *LOADS, "KiB written to the disk for 4 KiB over a base"],
            [
                [
                    who,
                    size,
                    *(results.text((who, size), load, "{:,.2f}") for load in LOADS),
                    results.text((who, size), "sectors_per_write", "{:,.0f}", 0.5),
                ]
                for who in whos
                for size in sizes
            ],
        ),
    ]

    def verdict(what, key, other, load, paper, better, why):
        return compared(results, what, paper, key, other, load, better, why)

    small, large, ours, ours_large = (THEIRS, "64k"), (THEIRS, "2M"), (OURS, "64k"), (OURS, "2M")
    whole = results.ratio(large, small, DIRECT)
    today = (
        f"Today's QEMU has {whole:.2f}x the direct writes with clusters of 2 MiB that it has with 64 KiB."
        if whole
        else ""
    )
    verdicts = [
        verdict(
            "direct write: isobath, clusters of 2 MiB ÷ 64 KiB",
            ours_large,
            ours,
            DIRECT,
            PAPER_LARGE,
            "higher",
            "a large cluster has more around what is written first that has to become zeroes",
        ),
        verdict(
            "direct write anywhere over a base: isobath with 64 KiB ÷ QEMU with 2 MiB",
            ours,
            large,
            ANYWHERE,
            1 / PAPER_LARGE,
            "higher",
            "each first write to a cluster copies the rest of it from the base",
        ),
        verdict(
            "sync write: isobath with 64 KiB ÷ QEMU with 2 MiB",
            ours,
            large,
            SYNC,
            1.0,
            "higher",
            "a large cluster is allocated once in 32 writes, so that QEMU has as few syncs",
        ),
        verdict(
            "sync write: isobath ÷ QEMU, 64 KiB",
            ours,
            small,
            SYNC,
            None,
            "higher",
            "the paper draws it without a number",
        ),
    ]
    return Section(
        paper=(
            "Large clusters need metadata rarely, so clusters of 2 MiB help synchronous writes as much as the paper's"
            " system does; but direct writes lost 50 %."
        ),
        ours=(
            f"The `{DISK}` disk. *Sync write*: a program appends 64 KiB and calls fdatasync, on a new image. *Direct"
            " write*: it appends 64 MiB in pieces of 64 KiB with O_DIRECT and syncs once. And what the paper did not"
            " measure: 400 writes of 4 KiB with O_DIRECT anywhere in a file that the base of an overlay has, and one"
            f" sync. {today}"
        ),
        parts=parts,
        verdicts=verdicts,
    )
