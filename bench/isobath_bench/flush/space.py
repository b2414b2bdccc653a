"""What a flush costs by how the file's space was prepared, without any server."""

import contextlib
import ctypes
import os
import random
import statistics
import threading
import time

from .. import tools
from ..rounds import Samples
from . import counts, mounts

BLOCK = 64 << 10
AHEAD = 1 << 20
WARM_UP = 20
KEEP_SIZE, ZERO_RANGE = 1, 16
LIBC = ctypes.CDLL(None, use_errno=True)


def length():
    return 40 if tools.QUICK else 400


def fallocate(file, mode, offset, amount):
    if LIBC.fallocate(file, mode, ctypes.c_long(offset), ctypes.c_long(amount)):
        raise tools.Failed(f"fallocate: {os.strerror(ctypes.get_errno())}")


def zeroes(file, offset, amount):
    for at in range(offset, offset + amount, AHEAD):
        os.pwrite(file, bytes(min(AHEAD, offset + amount - at)), at)
    os.fdatasync(file)


class Ahead:
    """Zeroes written in steps by a thread of its own, with its own fdatasync, a step ahead of the writer."""

    def __init__(self, file):
        self.file = file
        self.end = 0
        self.thread = None
        self.step()
        self.thread.join()

    def step(self):
        start, self.end = self.end, self.end + AHEAD
        self.thread = threading.Thread(target=zeroes, args=(self.file, start, AHEAD))
        self.thread.start()

    def reach(self, offset):
        if offset + BLOCK + AHEAD // 2 > self.end:
            self.thread.join()
            self.step()


# How the space is made ready before it is counted; `bytes` are all that will be written.
PREPARATIONS = {
    "nothing: appended": lambda file, amount: None,
    "ftruncate": os.ftruncate,
    "fallocate": lambda file, amount: fallocate(file, 0, 0, amount),
    "fallocate past the end (KEEP_SIZE)": lambda file, amount: fallocate(file, KEEP_SIZE, 0, amount),
    "ZERO_RANGE": lambda file, amount: fallocate(file, ZERO_RANGE, 0, amount),
    "zeroes written ahead": lambda file, amount: zeroes(file, 0, amount),
    "zeroes written 1 MiB ahead meanwhile, counted too": None,
    "written before, in another order": lambda file, amount: zeroes(file, 0, amount),
    "written before: the floor": lambda file, amount: (zeroes(file, 0, amount), zeroes(file, 0, amount)),
}
SHUFFLED = "written before, in another order"


def measure(system, counter, how):
    path = system.directory / "space"
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        places = [number * BLOCK for number in range(WARM_UP + length())]
        prepare = PREPARATIONS[how]
        ahead = Ahead(file) if prepare is None else None
        if prepare:
            prepare(file, len(places) * BLOCK)
        system.settle()
        if how == SHUFFLED:
            random.Random(1).shuffle(places)
        data, times = os.urandom(BLOCK), []
        for number, offset in enumerate(places):
            if number == WARM_UP:
                before = counter.now()
            began = time.perf_counter()
            os.pwrite(file, data, offset)
            os.fdatasync(file)
            times.append(time.perf_counter() - began)
            if ahead:
                ahead.reach(offset + BLOCK)
        if ahead:
            ahead.thread.join()
        after = counter.now()
        return {**(after - before).per(length()), "microseconds": statistics.median(times[WARM_UP:]) * 1e6}
    finally:
        os.close(file)


def run(rounds, seconds):
    del seconds
    samples = Samples()
    kinds = list(mounts.KINDS)
    for kind in kinds:
        with mounts.mounted(kind, filled=True) as system, contextlib.ExitStack() as stack:
            counter = stack.enter_context(counts.counting(system))
            for _ in range(rounds):
                for how in PREPARATIONS:
                    samples.attempt((kind, how), lambda: measure(system, counter, how))

    def cell(kind, how):
        parts = [("writes", "{:.1f}"), ("flushes", "{:.2f}"), ("kib", "{:,.0f}"), ("microseconds", "{:,.0f}")]
        return " / ".join(samples.text((kind, how), *part) for part in parts)

    table = {
        "title": "How the space was prepared",
        "text": (
            f"{length()} x 64 KiB written to a new place, an fdatasync after each: write requests / flush requests /"
            " KiB / median µs for each fdatasync, on a loop device. A write request of no bytes carries the flush, so"
            " the floor is 2 / 1 / 64."
        ),
        "columns": ["space prepared by", *kinds],
        "rows": [[how, *(cell(kind, how) for kind in kinds)] for how in PREPARATIONS],
    }
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {"samples": samples.raw(), "tables": [table], "goals": [], "figures": [], "notes": notes}
