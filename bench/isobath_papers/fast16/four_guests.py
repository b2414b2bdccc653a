"""Four guests at once on one slow disk: two that sync, two that do not."""

import contextlib

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Cause, compared
from . import guests
from .guests import DISKS, MAIL, OURS, PERSONALITIES, SPEED, THEIRS, TPCC

NAME = "four_guests"
TITLE = "Four guests at once"
SOURCE = "FAST '16, figure 8"

APPLICATIONS = [MAIL, TPCC, "fileserver", "webserver"]
PAPER = {("hdd", MAIL): 1.5, ("hdd", TPCC): 1.34, ("ssd", MAIL): 1.3, ("ssd", TPCC): 1.2} | {
    (disk, each): 1.0 for disk in DISKS for each in ("fileserver", "webserver")
}


def points(profile):
    """By disk and contender."""
    return [Point((disk, who), profile.of(2, 10)) for disk in profile.of(["ssd"], DISKS) for who in (OURS, THEIRS)]


def setting(profile):
    return guests.stages(profile.of(["ssd"], DISKS), APPLICATIONS)


def measure(stages, point, number):
    disk, who = point.key
    with contextlib.ExitStack() as stack:
        systems = {}
        for each in APPLICATIONS:
            systems[each] = stack.enter_context(
                guests.guest(who, stack.enter_context(guests.overlay(stages, disk, each, who)))
            )
        guests.together(systems, 0.2 if tools.QUICK else 1, number)
        before = stages[disk].requests()
        found = guests.together(systems, 0.5 if tools.QUICK else 5, number + 10)
        sent = stages[disk].requests() - before
    speeds = {each: found[each][SPEED[each]] for each in APPLICATIONS}
    return (
        speeds | {"new_order_ms": found[TPCC]["new_order_ms"]} | {f"disk_{name}": value for name, value in sent.items()}
    )


def section(results):
    found = guests.measured(results)
    parts, verdicts, rows = [], [], []
    for disk in found:
        ours, theirs = (disk, OURS), (disk, THEIRS)
        groups = {
            each: {who: relative(results, (disk, who), theirs, each) for who in (OURS, THEIRS)} for each in APPLICATIONS
        }
        paper = {each: {"its system": PAPER[disk, each], "QEMU 2.1.2": 1} for each in APPLICATIONS}
        parts.append(
            figures.bars(
                results, f"fig8-{disk}", f"Four guests at once, {DISKS[disk]}", "speed ÷ QEMU's", groups, paper=paper
            )
        )
        for each in APPLICATIONS:
            syncs = each in (MAIL, TPCC)
            mail = results.ratio(ours, theirs, MAIL)
            why = "it does not sync: what it is held up by is the others"
            if syncs and mail:
                why = (
                    f"the four share the disk, and varmail does {mail:.2f} times as much beside isobath's other guests"
                )
            what = f"{each} beside the other three, {DISKS[disk]}: isobath ÷ QEMU"
            verdicts.append(
                compared(results, what, PAPER[disk, each], ours, theirs, each, "higher", why, cause=Cause.OURS)
            )
        for key in (ours, theirs):
            rows.append(
                [
                    DISKS[disk],
                    key[1],
                    *(results.text(key, field) for field in (*APPLICATIONS, "disk_flushes", "disk_writes")),
                ]
            )
    columns = ["disk", "server", *APPLICATIONS, "disk's flushes", "disk's writes"]
    parts.append(Table("All of it: operations a second, of TPC-C New-Orders a minute.", columns, rows))
    files, threads = zip(*(PERSONALITIES[each] for each in ("fileserver", "webserver")), strict=True)
    return Section(
        paper=(
            "Four virtual machines at once with varmail, TPC-C, fileserver and webserver. Varmail and TPC-C gained 50 %"
            " and 34 % on HDD, 30 % and 20 % on SSD; the others, which hardly sync, stayed as they were."
        ),
        ours=(
            f"Four guests as above, each with a server of its own, for 5 s after 1 s. *fileserver* has {files[0]} files"
            f" of 128 KiB and {threads[0]} threads, *webserver* {files[1]} of 16 KiB and {threads[1]}; their threads"
            " think for 5 ms after each loop, since there are two processors for everything."
        ),
        parts=parts,
        verdicts=verdicts,
    )


def relative(results, key, theirs, application):
    """A median as a part of QEMU's."""
    own, other = results.median(key, application), results.median(theirs, application)
    return own / other if own and other else None
