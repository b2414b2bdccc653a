"""Postmark, the program itself, in a guest's file system."""

import contextlib
import shutil
import threading
import time

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import disks
from ..verdict import Baseline, Cause, Verdict, compared
from . import common
from .common import EMBEDDED, JOURNAL, QEMU, RAW

NAME = "postmark"
TITLE = "Postmark"
SOURCE = "Selfie, figure 9"

# Where the image lies, as the paper's parts a to d.
PLACES = ["hdd", "ssd", "hdd ext4", "hdd btrfs"]
DISK = 16 << 30
# Seconds between two times that the guest's file system is written back.
PAUSE = 0.5
# Section 3.2: QCOW2's time ÷ Selfie's, on the hard disk and the SSD.
GAIN = {"hdd": 2.6, "ssd": 1.4}


def who(place):
    """The raw disk is none of a file system's."""
    return [EMBEDDED, JOURNAL, QEMU] + ([] if " " in place else [RAW])


def points(profile):
    return [
        Point(
            (place, contender),
            seconds=profile.of(1, 4 if place == "ssd" else 10),
        )
        for place in PLACES
        for contender in who(place)
    ]


class Setting(common.Places):
    """How many files and transactions; the places."""

    def __init__(self, profile, stack):
        super().__init__(stack)
        if not shutil.which("postmark"):
            raise tools.Failed("postmark is missing: apt-get install postmark")
        self.files = profile.of(200, 4_000)
        self.transactions = self.files * 5


@contextlib.contextmanager
def setting(profile):
    with contextlib.ExitStack() as stack:
        yield Setting(profile, stack)


@contextlib.contextmanager
def written_back(directory):
    """Has a file system written back over and over, as a guest's own writeback does in a run that lasts longer."""
    over = threading.Event()

    def work():
        while not over.wait(PAUSE):
            common.synced(directory)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(setting, point, number):
    """Fields: `seconds` until all is synced; what the disk was sent; the server's `cpu` in seconds."""
    del number
    name, contender = point.key
    script = tools.WORK / "postmark.txt"
    with common.attached(contender, setting.place(name), DISK) as (disk, device):
        tools.run(*disks.MAKE, device)
        with common.mounted(device) as directory:
            script.write_text(
                f"set location {directory}\nset number {setting.files}\nset transactions {setting.transactions}\n"
                "set size 500 10005\nset subdirectories 10\nset seed 1\nset bias read 5\nset bias create 5\nrun\nquit\n"
            )
            common.synced(directory)
            before, cpu, began = disk.sent(), disk.server.cpu(), time.perf_counter()
            with written_back(directory):
                tools.run("postmark", script)
            common.synced(directory)
            seconds = time.perf_counter() - began
            return {"seconds": seconds, "cpu": disk.server.cpu() - cpu, **common.difference(disk.sent(), before)}


def section(results):
    keys = [point.key for point in points(results.profile)]
    groups = {
        place: {contender: results.median((place, contender), "seconds") for contender in who(place)}
        for place in PLACES
    }
    rows = []
    for key in keys:
        rows.append(
            [
                *key,
                results.text(key, "seconds", "{:.2f}"),
                results.spread_text(key, "seconds"),
                results.ratio_text(key, (key[0], EMBEDDED), "seconds"),
                *common.sent_texts(results, key),
                results.text(key, "cpu", "{:.2f}"),
            ]
        )
    columns = [
        "image on",
        "server",
        "s",
        "spread",
        "its time ÷ embedded's",
        "disk's writes",
        "flushes",
        "MB",
        "server's CPU, s",
    ]

    def gain(what, paper, place, better="higher", why="", one=QEMU, **more):
        return compared(results, what, paper, (place, one), (place, EMBEDDED), "seconds", better, why, **more)

    def on_volume(figure, place):
        """QEMU's time ÷ embedded's, and the raw disk's."""
        by_itself = f"{figure}, {place}: raw's time ÷ embedded's (the paper: no number, at most 1)"
        baseline = Baseline(
            f"{place}, QEMU's time ÷ the raw disk's",
            GAIN[place],
            results.ratio((place, QEMU), (place, RAW), "seconds"),
            by_itself,
            at_least=True,
        )
        return [
            gain(
                f"{figure}, {place}: QEMU's time ÷ embedded's",
                GAIN[place],
                place,
                why=bound(place),
                baseline=baseline,
            ),
            gain(by_itself, 1.0, place, why=more_writes(place), one=RAW, cause=Cause.OURS),
        ]

    def more_writes(place):
        """What embedded sends the disk, beside mode `journal` and the raw disk."""
        sent = [
            f"{results.text((place, one), 'writes')} writes in {results.text((place, one), 'seconds', '{:.2f}')} s"
            for one in (EMBEDDED, JOURNAL, RAW)
        ]
        return f"embedded sends the disk {sent[0]}, mode `journal` {sent[1]}, the raw disk is sent {sent[2]}"

    def bound(place):
        return (
            f"QEMU 7.2 does not sync within a request: it makes {results.text((place, QEMU), 'flushes')} flushes in"
            f" all, embedded {results.text((place, EMBEDDED), 'flushes')}; the raw disk takes"
            f" {results.text((place, RAW), 'seconds', '{:.2f}')} s, below which nobody comes"
        )

    def ahead(place):
        megabytes = [results.text((place, one), "bytes_written", "{:,.0f}", 1e-6) for one in (EMBEDDED, QEMU)]
        return (
            f"isobath writes zeroes ahead of use on a file system: the disk is sent {megabytes[0]} MB, by QEMU"
            f" {megabytes[1]} MB"
        )

    verdicts = [
        *on_volume("figure 9a", "hdd"),
        *on_volume("figure 9b", "ssd"),
        gain(
            "figure 9c, the image on ext4 (the paper: shorter, without a number)",
            1.0,
            "hdd ext4",
            why=ahead("hdd ext4"),
        ),
        gain(
            "figure 9d, the image on btrfs (the paper: shorter, without a number)",
            1.0,
            "hdd btrfs",
            why=ahead("hdd btrfs"),
        ),
    ]
    one, other = (results.median((place, EMBEDDED), "seconds") for place in ("hdd btrfs", "hdd ext4"))
    verdicts.append(
        Verdict(
            "figure 9d ÷ 9c: embedded on btrfs takes longer than on ext4 (the paper: significantly)",
            1.0,
            one and other and one / other,
            better="lower",
            cause=Cause.MACHINE,
            points=(("hdd btrfs", EMBEDDED), ("hdd ext4", EMBEDDED)),
            why="every write in place becomes a write to a new place there, for all servers",
        )
    )
    files = results.profile.of(200, 4_000)
    return Section(
        paper=(
            "Postmark makes 100,000 files of 500 B to 9.77 KB, does 500,000 transactions (reads, appends, creations,"
            " deletions) and deletes all. Selfie takes 1/2.6 of QCOW2's time on the hard disk (1/2.1 of FVD's), 1/1.4"
            " on the SSD; two thirds of the writes are overwrites, 17 % of first writes go to N-zones. With the image"
            " on Btrfs all take significantly longer than on ext4."
        ),
        ours=(
            f"The same program (Debian's), {files:,} files and {files * 5:,} transactions (a 25th), in ext4 on a loop"
            " device on the served disk (by nbdfuse, the same for all). As the run is that much shorter, the guest's"
            f" file system is written back every {PAUSE} s instead of every 5, and at the end. {common.ON_VOLUMES}"
            " Isobath has no N-zones (what does not compress is a change in the journal), so there is nothing to be"
            " counted for the 17 %."
        ),
        parts=[
            figures.bars(results, "fig9", "Postmark", "s", groups),
            Table(
                "Postmark",
                columns,
                rows,
                "What the disk was sent between begin and end of the program, and the sync behind it.",
            ),
        ],
        verdicts=verdicts,
    )
