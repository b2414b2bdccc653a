"""Syncs of the image for each flush of a guest, by the kernel's trace events."""

import os
import statistics

from isobath_bench import tools
from isobath_bench.flush import counts, mounts

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import disks
from ..verdict import Baseline, Verdict
from . import guests, writes
from .guests import OURS, RAW, THEIRS

NAME = "sync_counts"
TITLE = "What a guest's flush becomes"
SOURCE = "FAST '16, figure 2; section 2.2"

OVERWRITE, OVERLAY, APPEND, WORST = LOADS = ["overwrite", "overwrite, overlay", "append", "worst case"]
VMDK = "QEMU VMDK"
EVERYBODY = [OURS, "isobath journal", "isobath embedded", "isobath ordered", THEIRS, "QEMU lazy_refcounts", VMDK, RAW]
# The paper: host's syncs ÷ guest's of qcow2 and VMDK ("more than 3X", "4X"); at worst; with its optimisations.
PAPER_QCOW2, PAPER_VMDK, PAPER_WORST, PAPER_OURS = 3.0, 4.0, 8.0, 1.0
APART = 1 << 29
HUGE = 128 << 30
# Writes of the worst case that are told apart: the journal is made with one of them.
WARM_UP = 5


def points(profile):
    """By load and contender: what is counted is much the same each time."""
    few = [OURS, THEIRS, VMDK, RAW]
    found = [
        (load, who) for load in LOADS for who in (few if profile.quick else EVERYBODY) if (load, who) not in LEFT_OUT
    ]
    return [Point(key, profile.of(0.7, 1.5), once=True) for key in found]


# Without a base, or without tables.
LEFT_OUT = {(OVERLAY, VMDK), (OVERLAY, RAW), (WORST, RAW)}


def setting(profile):
    del profile
    return mounts.mounted("ext4")


def make(system, load, who):
    """A new image: with all clusters written, over a base, empty, or empty and large."""
    path, base = system.directory / "disk.img", system.directory / "base.qcow2"
    path.unlink(missing_ok=True)
    form = "raw" if who == RAW else "vmdk" if who == VMDK else "qcow2"
    how = ["-o", "lazy_refcounts=on"] if "lazy" in who else []
    if load == OVERWRITE or (load == APPEND and who == RAW):
        tools.run(
            "qemu-img",
            "convert",
            "-f",
            "raw",
            "-O",
            form,
            *how,
            *(["-S", "0"] if who == RAW else []),
            guests.prepared("file"),
            path,
        )
        return path
    over = []
    if load == OVERLAY:
        if not base.exists():
            tools.run("cp", guests.prepared("file").with_suffix(".qcow2"), base)
        over = ["-b", base, "-F", "qcow2"]
    tools.run(
        "qemu-img",
        "create",
        "-q",
        "-f",
        form,
        *how,
        *over,
        path,
        *([] if over else [HUGE if load == WORST else guests.GUEST_BYTES]),
    )
    return path


def length():
    """Writes that are counted."""
    return 20 if tools.QUICK else 200


def measure(system, point, number):
    del number
    load, who = point.key
    path = make(system, load, who)
    system.settle()
    try:
        with counts.counting(system) as counter:
            return worst(counter, who, path) if load == WORST else steady(counter, load, who, path)
    finally:
        path.unlink()


def steady(counter, load, who, path):
    """Writes of 64 KiB of a program in the guest, each with an fdatasync: what the guest, the image, and the disk
    flushed for each."""
    name, fresh = ("new", guests.MAKE) if load == APPEND and who != RAW else ("new" if load == APPEND else "file", None)
    with guests.guest(who, path, fresh) as guest:
        file = guest.directory / name
        warm, count = length() // 4, length()
        writes.synced(file, 60, 0, warm * writes.BLOCK)
        before, flushes = counter.now(), counts.requests(guest.device)["flushes"]
        done, _ = writes.synced(file, 60, warm * writes.BLOCK, (warm + count) * writes.BLOCK)
        flushes, after = counts.requests(guest.device)["flushes"] - flushes, counter.now()
    if done != count or not flushes:
        raise tools.Failed(f"{done} of {count} writes were made, the guest flushed {flushes} times")
    found = after - before
    return {
        "fdatasyncs": count,
        "guest_flushes": flushes,
        "syncs": found["syncs"],
        "disk_flushes": found["flushes"],
        "syncs_a_flush": found["syncs"] / flushes,
        "syncs_an_fdatasync": found["syncs"] / count,
        "disk_flushes_a_flush": found["flushes"] / flushes,
    }


def worst(counter, who, path):
    """Writes with a flush each, each so far from the last that it needs a table of its own: the syncs of each."""
    each = []
    with disks.serve(who, path) as disk:
        file = os.open(disk.file, os.O_RDWR)
        try:
            for number in range(10 if tools.QUICK else 60):
                before = counter.now()["syncs"]
                os.pwrite(file, os.urandom(writes.BLOCK), number * APART)
                os.fsync(file)
                each.append(counter.now()["syncs"] - before)
        finally:
            os.close(file)
    # The journal is made with one of the first, where there is one.
    return {
        "most": max(each[WARM_UP:]),
        "mean": statistics.fmean(each[WARM_UP:]),
        "first": max(each[:WARM_UP]),
        "each": each,
    }


def section(results):
    groups = {load: {who: results.median((load, who), "syncs_a_flush") for who in EVERYBODY} for load in LOADS[:3]}
    groups[WORST] = {who: results.median((WORST, who), "most") for who in EVERYBODY}
    paper = {
        "qcow2": {"QEMU 2.1.2": PAPER_QCOW2, "its system": PAPER_OURS},
        "VMDK": {"QEMU 2.1.2": PAPER_VMDK},
        "worst": {"QEMU 2.1.2": PAPER_WORST},
    }
    rows = []
    for who in EVERYBODY:
        for load in LOADS[:3]:
            if results.samples((load, who)):
                fields = ("guest_flushes", "syncs", "disk_flushes")
                ratios = (
                    results.text((load, who), field, "{:.2f}")
                    for field in ("syncs_a_flush", "syncs_an_fdatasync", "disk_flushes_a_flush")
                )
                rows.append(
                    [
                        who,
                        load,
                        results.text((load, who), "fdatasyncs"),
                        *(results.text((load, who), field) for field in fields),
                        *ratios,
                    ]
                )
    columns = ["server", "load", "fdatasyncs in the guest", "guest's flushes", "syncs of the image", "disk's flushes"]
    columns += ["syncs a flush", "syncs an fdatasync", "disk's flushes a flush"]
    worst_rows = [
        [
            who,
            *(
                results.text((WORST, who), field, form)
                for field, form in (("most", "{:,.0f}"), ("mean", "{:.2f}"), ("first", "{:,.0f}"))
            ),
        ]
        for who in EVERYBODY
        if results.samples((WORST, who))
    ]
    return Section(
        paper=(
            "A guest writes 64 KiB and calls fdatasync; overwriting what is allocated, or appending. QEMU 2.1.2 made"
            " more than three syncs of a qcow2 image for each of the guest's, four of a VMDK image, up to eight at"
            " worst; the optimised one made one for each flush."
        ),
        ours=(
            "As the paper: a program in a guest's ext4, 200 writes after 50 that are not counted. A guest's flushes"
            " are those that its disk was sent (an fdatasync of a file that has grown makes two), the image's syncs"
            " are counted by the trace event of the host's ext4, the disk's flushes at the loop device below."
            " *Overwrite, overlay*: the image is an overlay, so each write allocates. *Worst case*: writes on a disk"
            " of 128 GiB that are 512 MiB apart, so that each needs a new table; the most syncs that one write with"
            f" its flush made, after {WARM_UP}: isobath makes its journal with one of the first."
        ),
        parts=[
            figures.bars(
                results, "fig2", "Syncs of the image for each flush of the guest", "syncs", groups, paper=paper
            ),
            Table("Counted.", columns, rows),
            Table(
                "Worst case: syncs of one write and its flush.",
                ["server", "most", "mean", f"most of the first {WARM_UP}"],
                worst_rows,
            ),
        ],
        verdicts=verdicts(results),
    )


def verdicts(results):
    found = []
    for load in LOADS[:3]:
        for who in (OURS, "isobath embedded"):
            if results.samples((load, who)):
                value = results.median((load, who), "syncs_a_flush")
                found.append(
                    Verdict(
                        f"{load}: syncs of the image a flush, {who}", PAPER_OURS, value, None, "lower", "", "{:.3f}"
                    )
                )
    for load, who, paper in ((OVERLAY, THEIRS, PAPER_QCOW2), (APPEND, THEIRS, PAPER_QCOW2), (APPEND, VMDK, PAPER_VMDK)):
        value, theirs = (
            results.ratio((load, OURS), (load, who), "syncs_a_flush"),
            results.text((load, who), "syncs_a_flush", "{:.2f}"),
        )
        why = (
            f"one sync a flush, which isobath makes, is the least there can be; today's {who} makes {theirs}, the"
            f" paper's {paper:g}"
        )
        today = results.median((load, who), "syncs_a_flush")
        found.append(
            Verdict(
                f"{load}: syncs, isobath ÷ {who}",
                PAPER_OURS / paper,
                value,
                None,
                "lower",
                why,
                baseline=Baseline(
                    f"{who}'s syncs of the image a flush, of which a raw disk needs one",
                    paper,
                    today,
                    f"{load}: syncs of the image a flush, {OURS}",
                    form="{:.2f}",
                ),
            )
        )
    most, by_itself = results.median((WORST, OURS), "most"), "worst case: syncs of one write with its flush, isobath"
    found.append(Verdict(by_itself, PAPER_OURS, most, None, "lower", "", "{:.0f}"))
    ratio = results.ratio((WORST, OURS), (WORST, THEIRS), "most")
    why = f"today's QEMU makes {results.text((WORST, THEIRS), 'most')} at worst, the paper's eight"
    today = results.median((WORST, THEIRS), "most")
    measure = "QEMU's syncs of one write with its flush at worst, of which a raw disk needs one"
    baseline = Baseline(measure, PAPER_WORST, today, by_itself, form="{:.0f}")
    found.append(
        Verdict("worst case: isobath ÷ QEMU", PAPER_OURS / PAPER_WORST, ratio, None, "lower", why, baseline=baseline)
    )
    return found
