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

    def per(self, guest_flushes):
        """For each flush of the guest; kilobytes instead of sectors."""
        each = {name: value / guest_flushes for name, value in self.items()}
        return Counts({**each, "kib": each["sectors"] / 2})


class Counter:
    """Counts on one file system."""

    def __init__(self, system, instance):
        self.system = system
        self.instance = instance
        self.event = instance / "events" / EVENTS[system.kind.split()[0]]
        # Btrfs names its file systems by UUID, which the filter cannot compare.
        number = os.stat(system.device).st_rdev
        self.ours = ""
        if "btrfs" in system.kind:
            self.ours = tools.run("blkid", "--match-tag=UUID", "--output=value", system.device).strip()
        else:
            kernel = os.major(number) << 20 | os.minor(number)
            (self.event / "filter").write_text(f"dev == {kernel}\n")
        (self.event / "enable").write_text("1\n")

    def now(self):
        """Syncs of files, and write and flush requests and sectors that have reached the device."""
        lost = sum(
            int(re.search(r"^overrun: (\d+)", stats.read_text(), re.M).group(1))
            for stats in self.instance.glob("per_cpu/cpu*/stats")
        )
        if lost:
            raise tools.Failed(f"{lost} events were lost: buffer_size_kb is too small")
        name = self.event.name
        lines = (self.instance / "trace").read_text().splitlines()
        fields = Path(f"/sys/block/{self.system.device.name}/stat").read_text().split()
        counts = Counts({what: int(fields[index]) for what, index in FIELDS.items()})
        counts["syncs"] = sum(f" {name}: " in line and self.ours in line for line in lines)
        return counts


@contextlib.contextmanager
def counting(system):
    """A counter, in a tracing instance of its own."""
    if not (TRACING / "instances").is_dir():
        raise tools.Failed(f"there is no {TRACING}/instances: run as root, on a kernel with ftrace: mount -t tracefs none {TRACING}")
    instance = TRACING / "instances" / f"isobath-{os.getpid()}"
    instance.mkdir()
    try:
        yield Counter(system, instance)
    finally:
        instance.rmdir()
