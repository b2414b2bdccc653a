"""Whether the machine is quiet enough to measure on it: nobody else's programs run, the host lends its processors to no
other machine, and the raw disk keeps its pace.

A run waits for that before each round of an experiment, and looks during the round and after it: what was measured on
a busy machine is thrown away, and measured again.
"""

import mmap
import os
import statistics
import time
from dataclasses import dataclass

from isobath_bench import tools

# At most: the part of the processors' time that the host took, processes of others that want to run, half the range of
# the raw disk's times ÷ their median.
STEAL, RUNNING, DISK = 0.02, 0.5, 0.25
# Looks at the run queue before a round, their distance in seconds, and those between two measurements.
LOOKS, APART, BETWEEN = 20, 0.1, 3
# Times that the raw disk is probed, before and after a round each.
PROBES = 5
# Seconds between two looks while it is busy, and after which the run ends.
PAUSE, LIMIT = 15, 900
# How often a round is measured before the run ends.
TRIES = 3


class Busy(tools.Failed):
    """A machine that does not become quiet."""


@dataclass(frozen=True)
class Ticks:
    """The processors' time since the machine's start: all, and what the host took of it."""

    total: int
    steal: int


class Machine:
    """This one."""

    def now(self):
        return time.monotonic()

    def sleep(self, seconds):
        time.sleep(seconds)

    def ticks(self):
        """From the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; a guest's are in
        the first two."""
        with open("/proc/stat") as file:
            values = [int(each) for each in file.readline().split()[1:9]]
        return Ticks(sum(values), values[7])

    def running(self):
        """Processes that run or want to, but for this one."""
        with open("/proc/stat") as file:
            found = next(int(line.split()[1]) for line in file if line.startswith("procs_running"))
        return max(found - 1, 0)

    def disk(self):
        """Seconds that 16 writes of 64 KiB take, each synced, past the page cache."""
        tools.WORK.mkdir(parents=True, exist_ok=True)
        path = tools.WORK / "quiet"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, 1 << 16) as data:
                began = time.monotonic()
                for number in range(16):
                    os.pwrite(file, data, number << 16)
                    os.fdatasync(file)
                return time.monotonic() - began
        finally:
            os.close(file)
            path.unlink()


class Watch:
    """Looks at a machine before, during and after a round."""

    def __init__(self, machine):
        self.machine = machine

    def wait(self, note):
        """Returns when the machine is quiet, raises `Busy` if it does not become so. `note` is told of waiting."""
        began = self.machine.now()
        while True:
            self.begin()
            self.look(LOOKS)
            why = self.why()
            if why is None:
                return
            if self.machine.now() - began >= LIMIT:
                raise Busy(
                    f"the machine has been busy for {LIMIT // 60} minutes: {why}. Run this again when nothing else"
                    " runs: what was measured is on record, and the next run goes on from there"
                )
            note(f"the machine is busy, waits {PAUSE} s: {why}")
            self.machine.sleep(PAUSE)

    def begin(self):
        """Before a round: what follows is compared with this."""
        self.probes = [self.machine.disk() for _ in range(PROBES)]
        self.queue = []
        self.ticks = self.machine.ticks()

    def look(self, times=BETWEEN):
        """Between two measurements, when none of ours run."""
        for number in range(times):
            if number:
                self.machine.sleep(APART)
            self.queue.append(self.machine.running())

    def end(self):
        """After a round: why it does not count, or `None`."""
        ticks = self.machine.ticks()
        self.look()
        self.probes += [self.machine.disk() for _ in range(PROBES)]
        return self.why(ticks)

    def why(self, ticks=None):
        """What is too much since `begin`, or `None`."""
        ticks = ticks or self.machine.ticks()
        total = ticks.total - self.ticks.total
        steal = (ticks.steal - self.ticks.steal) / total if total > 0 else 0.0
        running = statistics.mean(self.queue)
        disk = (max(self.probes) - min(self.probes)) / 2 / statistics.median(self.probes)
        found = []
        if steal > STEAL:
            found.append(f"the host takes {steal:.0%} of the processors' time (at most {STEAL:.0%})")
        if running > RUNNING:
            found.append(f"{running:.1f} processes of others want to run (at most {RUNNING:g})")
        if disk > DISK:
            found.append(f"the raw disk's times differ by ±{disk:.0%} (at most ±{DISK:.0%})")
        return ", ".join(found) or None


class Careless:
    """Looks at nothing: for a quick run, whose figures mean nothing."""

    def wait(self, note):
        pass

    def begin(self):
        pass

    def look(self):
        pass

    def end(self):
        return None
