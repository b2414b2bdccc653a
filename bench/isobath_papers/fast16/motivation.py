"""A sequential writer beside somebody who calls fdatasync all the time."""

import contextlib
import os
import threading
import time

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import compared
from . import guests, writes
from .guests import DISKS, OURS, RAW, THEIRS

NAME = "motivation"
TITLE = "A sequential writer beside one who syncs"
SOURCE = "FAST '16, section 1"

ALONE, BESIDE = "alone", "beside"
INTERVAL = 0.01
PAPER_LOSS = 0.545
BYTES = 1 << 30


def points(profile):
    """By disk, contender, and whether somebody syncs."""
    return [
        Point((disk, who, how), profile.of(1, 5))
        for disk in profile.of(["ssd"], ["hdd"])
        for who in (OURS, THEIRS, RAW)
        for how in (ALONE, BESIDE)
    ]


def setting(profile):
    return guests.stages(profile.of(["ssd"], ["hdd"]), ["file"])


class Syncer:
    """Overwrites 4 KiB of a file and calls fdatasync, every 10 ms or as fast as it goes."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR)
        self.syncs = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        size = os.fstat(self.file).st_size
        data = os.urandom(4096)
        while not self.over.wait(INTERVAL):
            os.pwrite(self.file, data, self.syncs * writes.BLOCK % size)
            os.fdatasync(self.file)
            self.syncs += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        os.close(self.file)


@contextlib.contextmanager
def writer_image(stages, disk, who):
    """The new image of the writer, without the page cache, so that the disk is what it writes to."""
    with guests.new_image(stages, disk, "writer") as path:
        tools.run("qemu-img", "create", "-q", "-f", "raw" if who == RAW else "qcow2", path, BYTES)
        yield path


def measure(stages, point, number):
    del number
    disk, who, how = point.key
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(
            guests.served(who, stack.enter_context(writer_image(stages, disk, who)), cache="none")
        )
        guest = stack.enter_context(guests.guest(who, stack.enter_context(guests.overlay(stages, disk, "file", who))))
        syncer = stack.enter_context(Syncer(guest.directory / "file")) if how == BESIDE else None
        speed = sequential(writer.file, 0.3 if tools.QUICK else 3)
    return {"bytes_per_second": speed, "syncs": syncer.syncs if syncer else 0}


def sequential(path, seconds):
    """Writes 256 KiB after the other, and gives the bytes a second."""
    block = 256 << 10
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        data, place = writes.bytes_of(block), 0
        began = now = time.perf_counter()
        while now < began + seconds and place + block <= BYTES:
            os.pwrite(file, data, place)
            place, now = place + block, time.perf_counter()
        return place / (now - began)
    finally:
        os.close(file)


def section(results):
    disks = guests.measured(results)
    whos = (OURS, THEIRS, RAW)
    groups = {
        f"{DISKS[disk]}, {how}": {who: value(results, disk, who, how) for who in whos}
        for disk in disks
        for how in (ALONE, BESIDE)
    }
    rows, verdicts = [], []
    for disk in disks:
        for who in whos:
            keys = [(disk, who, how) for how in (BESIDE, ALONE)]
            part = results.ratio(*keys, "bytes_per_second")
            rows.append(
                [
                    DISKS[disk],
                    who,
                    *(results.text((disk, who, how), "bytes_per_second", "{:,.1f}", 1e-6) for how in (ALONE, BESIDE)),
                    f"{100 * (1 - part):.0f} %" if part else "-",
                    results.text((disk, who, BESIDE), "syncs"),
                ]
            )
            if who == OURS:
                why = (
                    "the disks are simulated, and what a flush costs them is not what it cost the paper's, which does"
                    " not name its disk here"
                )
                what = f"sequential writes, {DISKS[disk]}, isobath: beside ÷ alone"
                verdicts.append(compared(results, what, 1 - PAPER_LOSS, *keys, "bytes_per_second", "higher", why))
    return Section(
        paper=(
            "What moved the authors: sequential writes lost 54.5 % of their speed when another application called"
            " fdatasync every 10 ms. (They also found an SSD to do 76 % more random writes with its write cache's"
            " flushes switched off; the simulated one has no such switch.)"
        ),
        ours=(
            "A disk of 1 GiB is written in pieces of 256 KiB, one at a time, past the host's page cache, while a"
            " program on another disk of the same server's kind overwrites 4 KiB of what its base has and calls"
            " fdatasync, every 10 ms or as fast as it goes. 3 s each."
        ),
        parts=[
            figures.bars(results, "motivation", "Sequential writes beside one who syncs", "MB/s", groups),
            Table(
                "What the writer and the other did.",
                ["disk", "server", "alone, MB/s", "beside, MB/s", "lost", "syncs meanwhile"],
                rows,
            ),
        ],
        verdicts=verdicts,
    )


def value(results, disk, who, how):
    """Megabytes a second, or nothing."""
    found = results.median((disk, who, how), "bytes_per_second")
    return found / 1e6 if found else None
