"""A mail server and TPC-C, on a slow disk of their own and beside a neighbour on it."""

from isobath_bench import tools
from isobath_bench.flush import counts

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Baseline, Cause, compared
from . import guests
from .guests import DISKS, MAIL, OURS, RAW, RAW_QEMU, SPEED, THEIRS, TPCC

NAME = "macro"
TITLE = "A mail server and TPC-C, alone and beside neighbours"
SOURCE = "FAST '16, figures 6 and 7; section 1, varmail on raw"

ALONE = "alone"
BESIDE = [ALONE, "seq", "ran"]
# The paper's text: its system ÷ QEMU, in speed and in the latency of New-Orders (of which it does not name the disk).
PAPER_SPEED = {("hdd", "ran", MAIL): 2.1, ("ssd", "seq", MAIL): 1.5, ("hdd", "ran", TPCC): 1.5}
PAPER_LATENCY = {("hdd", "ran"): 0.6, ("ssd", "ran"): 0.6}
PAPER_OF_RAW = 0.5
# Syncs of the image for each of a raw file's ("more than 3X").
PAPER_SYNCS = 3.0
NEIGHBOUR_BYTES = 256 << 20


def points(profile):
    """By disk, neighbour, application, contender."""
    if profile.quick:
        return [
            Point(("ssd", beside, each, who), 1)
            for beside in (ALONE, "ran")
            for each in (MAIL, TPCC)
            for who in (OURS, THEIRS)
        ]
    pairs = [(each, who) for each in (MAIL, TPCC) for who in (OURS, THEIRS)]
    found = [
        Point((disk, beside, *pair), seconds(disk, beside) + 2.5)
        for disk in DISKS
        for beside in BESIDE
        for pair in pairs
    ]
    return found + [Point((disk, ALONE, MAIL, who), 8) for disk in DISKS for who in (RAW, RAW_QEMU)]


def setting(profile):
    return guests.stages(profile.of(["ssd"], DISKS), [MAIL, TPCC], profile.of(16 << 20, NEIGHBOUR_BYTES))


def seconds(disk, beside):
    """How long; a flush takes a tenth of a second and more where a turning disk has random writes in its cache."""
    if tools.QUICK:
        return 0.3
    return 6 if (disk, beside) == ("hdd", "ran") else 3.5


def measure(stages, point, number):
    disk, beside, application, who = point.key
    how = beside if beside != ALONE else ""
    with guests.overlay(stages, disk, application, who) as image, guests.guest(who, image) as guest:
        with guests.neighbour(who, stages.neighbour(disk), how) as end:
            # What happens once, as the making of a journal, is not counted.
            guests.together({application: guest}, 0.2 if tools.QUICK else 1, number)
            before, flushes = stages[disk].requests(), counts.requests(guest.device)["flushes"]
            found = guests.together({application: guest}, seconds(disk, beside), number + 10)[application]
            flushes = counts.requests(guest.device)["flushes"] - flushes
            sent = stages[disk].requests() - before
            found |= end()
    return found | {"guest_flushes": flushes} | {f"disk_{name}": value for name, value in sent.items()}


def per_flush(results, key, field, factor=1):
    """What the disk was sent for each flush of the guest; `None` if that was not measured."""
    values = [
        sample[field] * factor / sample["guest_flushes"] for sample in results.samples(key) if sample["guest_flushes"]
    ]
    return sum(values) / len(values) if values else None


def per_flush_text(results, key, field, factor=1):
    value = per_flush(results, key, field, factor)
    return "-" if value is None else f"{value:.2f}"


def section(results):
    parts = []
    for disk in guests.measured(results):
        for application, unit in ((MAIL, "operations a second"), (TPCC, "New-Orders a minute (tpmC)")):
            groups = {
                beside: {
                    who: results.median((disk, beside, application, who), SPEED[application]) for who in (OURS, THEIRS)
                }
                for beside in BESIDE
            }
            parts.append(
                figures.bars(results, f"fig6-{disk}-{application}", f"{application} on {DISKS[disk]}", unit, groups)
            )
    latency = {
        f"{DISKS[disk]}, {beside}": {
            who: results.median((disk, beside, TPCC, who), "new_order_ms") for who in (OURS, THEIRS)
        }
        for disk in guests.measured(results)
        for beside in BESIDE
    }
    parts.append(figures.bars(results, "fig7", "TPC-C: mean latency of a New-Order", "ms", latency, log=True))
    rows = []
    for key in sorted(results.keys()):
        disk, beside, application, who = key
        ratio = results.ratio(key, (*key[:3], THEIRS), SPEED[application]) if who == OURS else None
        rows.append(
            [
                DISKS[disk],
                beside,
                application,
                who,
                results.text(key, SPEED[application]),
                f"{ratio:.2f}x" if ratio else "",
                results.text(key, "new_order_ms", "{:,.1f}") if application == TPCC else "",
                per_flush_text(results, key, "disk_flushes"),
                results.text(key, "neighbour_bytes_per_second", "{:,.1f}", 1e-6) if beside != ALONE else "",
                per_flush_text(results, key, "disk_sectors", 0.5),
            ]
        )
    columns = [
        "disk",
        "neighbour",
        "application",
        "server",
        "operations a second, or tpmC",
        "÷ QEMU",
        "New-Order, ms",
        "disk's flushes a guest flush",
    ]
    columns += ["neighbour's MB/s", "KiB to the disk a guest flush"]
    parts.append(Table("All of it.", columns, rows))
    return Section(
        paper=(
            "Filebench's varmail and TPC-C in one virtual machine, alone (*raw* in the paper's figures), beside a"
            " second one that does sequential I/O, and beside one that does random I/O. Varmail gained up to 110 %"
            " (HDD, beside random), 50 % on SSD beside sequential; TPC-C up to 50 %, its latency fell by up to 40 %"
            " (beside random). Varmail on qcow2 had half the speed of raw."
        ),
        ours=(
            "A guest is an ext4 of 256 MiB in an overlay over a base that has its files. Disks are simulated:"
            f" {guests.DISKS_TEXT}. *varmail*: the operations of filebench's personality, 1,000 files of 16 KiB, 16"
            " threads, by a program of our own. *TPC-C*: the specification's five transactions in its mix on SQLite"
            " with a write-ahead log and `synchronous=full`, one terminal without think time, 4 warehouses with a"
            " tenth of the customers and orders and a fifth of the items. 3.5 s each (HDD beside *ran*: 6 s), after 1"
            " s that does not count. *Neighbour*: fio on a second disk served by the same server's kind;"
            f" {guests.NEIGHBOURS_TEXT}. *raw* is a copy of the disk with all its blocks written, served by isobath,"
            " *raw by QEMU* the same by QEMU: what the way to the guest costs either."
        ),
        parts=parts,
        verdicts=verdicts(results),
    )


def verdicts(results):
    found = []
    for disk in guests.measured(results):
        for beside in BESIDE:
            for application in (MAIL, TPCC):
                if paper := PAPER_SPEED.get((disk, beside, application)):
                    keys = [(disk, beside, application, who) for who in (OURS, THEIRS)]
                    what = f"{application}, {DISKS[disk]}, {beside}: isobath ÷ QEMU"
                    why = flushes(results, disk, beside, application)
                    if application == MAIL:
                        why += sectors(results, keys)
                    baseline = today(results, disk, beside, application)
                    more = {"cause": Cause.OURS, "baseline": baseline}
                    found.append(compared(results, what, paper, *keys, SPEED[application], "higher", why, **more))
        for beside in BESIDE:
            if paper := PAPER_LATENCY.get((disk, beside)):
                keys = [(disk, beside, TPCC, who) for who in (OURS, THEIRS)]
                what = f"New-Order's latency, {DISKS[disk]}, {beside}: isobath ÷ QEMU"
                why = flushes(results, disk, beside, TPCC)
                more = {"cause": Cause.OURS, "baseline": today(results, disk, beside, TPCC)}
                found.append(compared(results, what, paper, *keys, "new_order_ms", "lower", why, **more))
        keys = [(disk, ALONE, MAIL, who) for who in (OURS, RAW)]
        if results.ratio(*keys, SPEED[MAIL]):
            kib = [per_flush_text(results, key, "disk_sectors", 0.5) for key in keys]
            why = (
                f"for a flush of the guest the disk is sent {kib[0]} KiB by isobath (copies of the base's clusters,"
                f" zeroes ahead, records), {kib[1]} by raw"
            )
            what = f"varmail, {DISKS[disk]}, alone: isobath ÷ raw"
            found.append(compared(results, what, PAPER_OF_RAW, *keys, SPEED[MAIL], "higher", why))
    return found


def today(results, disk, beside, application):
    """What QEMU took and takes: of varmail, which the paper has on raw, alone; else of syncs."""
    if application == MAIL:
        keys = ((disk, ALONE, MAIL, RAW), (disk, ALONE, MAIL, THEIRS))
        return Baseline("varmail alone, raw's speed ÷ QEMU's", 1 / PAPER_OF_RAW, results.ratio(*keys, SPEED[MAIL]))
    return Baseline(
        f"{application}, {DISKS[disk]}, {beside}: QEMU's syncs a flush, of which a raw disk needs one (the paper's of"
        " figure 2, since it has none of TPC-C; today's: flushes of the disk, which are no fewer)",
        PAPER_SYNCS,
        per_flush(results, (disk, beside, application, THEIRS), "disk_flushes"),
        form="{:.2f}",
    )


def sectors(results, keys):
    """How much more isobath sends the disk."""
    ours, theirs = (per_flush_text(results, key, "disk_sectors", 0.5) for key in keys)
    return (
        f"; isobath sends it {ours} KiB for each (copies of the base's clusters, zeroes ahead, records), QEMU {theirs}"
    )


def flushes(results, disk, beside, application):
    """What each makes of a guest's flush, of which the ratio comes."""
    ours, theirs = (per_flush_text(results, (disk, beside, application, who), "disk_flushes") for who in (OURS, THEIRS))
    return (
        f"for each flush of the guest the disk is sent {theirs} by today's QEMU (the paper's made up to four syncs of"
        f" it, each of which could be two for the disk) and {ours} by isobath"
    )
