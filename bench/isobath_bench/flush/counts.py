"""What the kernel counts: syncs of files on a file system, requests to the device under it."""

import contextlib
import os
import re
from pathlib import Path

from .. import tools

TRACING = Path("/sys/kernel/tracing")
# Each file system's own event of an fsync or fdatasync, whoever asks for it: a system call or io_uring.
EVENTS = {"ext4": "ext4/ext4_sync_file_enter", "XFS": "xfs/xfs_file_fsync", "btrfs": "btrfs/btrfs_sync_file"}
FIELDS = {"writes": 4, "sectors": 6, "flushes": 15}


class Counts(dict):
    """What was counted so far, or between two times: `later - earlier`."""

    def __sub__(self, other):
        return Counts({name: self[name] - other[name] for name in self})

    def add(self, other):
        for name, value in other.items():
            self[name] = self.get(name, 0) + value

    def per(self, guest_flushes):
        """For each flush of the guest; kilobytes instead of sectors."""
        each = {name: value / guest_flushes for name, value in self.items()}
        return Counts({**each, "kib": each["sectors"] / 2})


def kernel_number(device):
    """A device's number as trace events have it."""
    number = os.stat(device).st_rdev
    return os.major(number) << 20 | os.minor(number)


def requests(device):
    """Write and flush requests and sectors that have reached a device."""
    fields = Path(f"/sys/block/{Path(device).name}/stat").read_text().split()
    return Counts({what: int(fields[index]) for what, index in FIELDS.items()})


@contextlib.contextmanager
def tracing():
    """A tracing instance, apart from all others."""
    if not (TRACING / "instances").is_dir():
        raise tools.Failed(
            f"there is no {TRACING}/instances: run as root, on a kernel with ftrace: mount -t tracefs none {TRACING}"
        )
    instance = TRACING / "instances" / f"isobath-{os.getpid()}"
    instance.mkdir()
    try:
        yield instance
    finally:
        instance.rmdir()


def check_complete(instance):
    for stats in instance.glob("per_cpu/cpu*/stats"):
        lost = int(re.search(r"^overrun: (\d+)", stats.read_text(), re.M).group(1))
        if lost:
            raise tools.Failed(f"{lost} events were lost: the tracing buffer is too small")


class Counter:
    """Counts on one file system."""

    def __init__(self, system, instance):
        self.system = system
        self.instance = instance
        self.event = instance / "events" / EVENTS[system.kind.split()[0]]
        self.ours = ""
        if "btrfs" in system.kind:
            # Btrfs names its file systems by UUID, which the filter cannot compare.
            self.ours = tools.run("blkid", "--match-tag=UUID", "--output=value", system.device).strip()
        else:
            (self.event / "filter").write_text(f"dev == {kernel_number(system.device)}\n")
        (self.event / "enable").write_text("1\n")

    def now(self):
        """Syncs of files, and requests to the device, so far."""
        check_complete(self.instance)
        name = f" {self.event.name}: "
        lines = (self.instance / "trace").read_text().splitlines()
        counts = requests(self.system.device)
        counts["syncs"] = sum(name in line and self.ours in line for line in lines)
        return counts


@contextlib.contextmanager
def counting(system):
    """A counter on a file system."""
    with tracing() as instance:
        yield Counter(system, instance)
