"""The guest: fio in bursts, with every request on record."""

import random
import signal
import subprocess
from array import array
from bisect import bisect_left
from itertools import pairwise

from .. import tools

BLOCK = 16 << 10
DEPTH = 64
# The most that fio makes room for at a time.
LOG_ENTRIES = 1 << 20
# Where none ends for so long, in seconds, the guest pauses.
PAUSE = 0.05


class Burst:
    """A time in which the guest works, in seconds since it started."""

    def __init__(self, start, end):
        self.start = start
        self.end = end


def bursts(seed, longest, seconds):
    """Bursts and pauses in turn, each of a twentieth of `longest` to `longest`, for some seconds."""
    lengths = random.Random(seed)
    found, at = [], 0.0
    while at < seconds:
        length, pause = (lengths.uniform(longest / 20, longest) for _ in range(2))
        found.append(Burst(at, at + length))
        at += length + pause
    return found


# A recorded guest: 1,200 s, 574 s of them in bursts of 7.86 s on average and 48 s at most.
TRACE_SECONDS, TRACE_BUSY, TRACE_MEAN, TRACE_LONGEST = 1200, 574, 7.86, 48


def trace(seed, seconds):
    """Bursts with the statistics of the recorded guest, as if its time were `seconds` long."""
    lengths = random.Random(seed)
    count = round(TRACE_BUSY / TRACE_MEAN)
    scale = seconds / TRACE_SECONDS

    def drawn(total, longest):
        """Lengths of that sum, distributed exponentially below the longest."""
        each = [lengths.expovariate(1) for _ in range(count)]
        for _ in range(50):
            factor = total / sum(each)
            each = [min(one * factor, longest) for one in each]
        return each

    busy = drawn(TRACE_BUSY, TRACE_LONGEST)
    pauses = drawn(TRACE_SECONDS - TRACE_BUSY, TRACE_SECONDS)
    found, at = [], 0.0
    for length, pause in zip(busy, pauses, strict=True):
        found.append(Burst(at * scale, (at + length) * scale))
        at += length + pause
    return found


class Guest:
    """fio, running: random reads and writes in bursts, at full speed in a burst.

    `began` is the time of the first request, since the epoch.
    """

    def __init__(
        self, server, schedule, offset, size, *, block=BLOCK, depth=DEPTH, rw="randrw", name="guest", rate=20_000
    ):
        self.schedule = schedule
        self.directory = tools.WORK / f"live-{name}"
        self.directory.mkdir(exist_ok=True)
        for path in self.directory.iterdir():
            path.unlink()
        lines = [
            "[global]", "ioengine=nbd", f"uri={server.uri}", f"rw={rw}", f"bs={block}", f"iodepth={depth}", "thread",
            f"offset={offset}", f"size={size}", "norandommap", "time_based", "randrepeat=1", "disable_slat=1",
            "disable_clat=1", "log_unix_epoch=1", "per_job_logs=0",
        ]  # fmt: skip
        for number, burst in enumerate(schedule):
            length = burst.end - burst.start
            lines += [
                f"[{number}]", f"startdelay={round(burst.start * 1000)}ms", f"runtime={max(round(length * 1000), 1)}ms",
                # Room from the start: fio holds requests up while it makes more.
                f"log_entries={min(round((length + 1) * rate), LOG_ENTRIES)}", f"randseed={number + 1}",
                f"write_lat_log={self.directory}/{number}",
            ]  # fmt: skip
        jobs = self.directory / "jobs.fio"
        jobs.write_text("\n".join(lines) + "\n")
        self.log = open(self.directory / "fio.out", "w+")
        self.process = subprocess.Popen(["fio", str(jobs)], stdout=self.log, stderr=subprocess.STDOUT)

    def wait(self, seconds):
        """Lets it work for some seconds, or until it has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def stop(self):
        """Ends it, and gives its requests in order of time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise tools.Failed("fio does not end") from error
        finally:
            self.log.seek(0)
            said = self.log.read()
            self.log.close()
        requests = Requests()
        for path in sorted(self.directory.glob("*_lat.log"), key=lambda path: int(path.name.split("_")[0])):
            requests.read(path)
        if "error=" in said or not requests.at:
            raise tools.Failed(f"fio failed: {said[-1000:]}")
        return requests


class Requests:
    """Every request, in order of their ends: when that was, in seconds since the epoch, how long it took, in
    seconds, and its bytes."""

    def __init__(self):
        self.at = array("d")
        self.took = array("d")
        self.bytes = array("L")

    def read(self, path):
        """A log of fio's: milliseconds, nanoseconds, direction, bytes, offset."""
        with open(path) as file:
            for line in file:
                at, took, _, length, _ = line.split(", ")
                self.at.append(int(at) / 1e3)
                self.took.append(int(took) / 1e9)
                self.bytes.append(int(length))

    @property
    def began(self):
        """When the first one began, to a millisecond."""
        return self.at[0] - self.took[0]

    def between(self, start, end):
        """The bytes, and how long each request took, of those that ended in a time."""
        first, last = bisect_left(self.at, start), bisect_left(self.at, end)
        return sum(self.bytes[first:last]), sorted(self.took[first:last])

    def longest(self, start, end):
        """The longest that a request took which was under way in a time, in seconds."""
        # Whatever takes longer than a minute has failed.
        span = range(bisect_left(self.at, start), bisect_left(self.at, end + 60))
        return max((self.took[number] for number in span if self.at[number] - self.took[number] < end), default=0.0)

    def busy(self, start, end):
        """The seconds of a time in which requests ended one after another."""
        ends = self.at[bisect_left(self.at, start) : bisect_left(self.at, end)]
        gaps = (after - before for before, after in pairwise(ends))
        return sum(gap for gap in gaps if gap < PAUSE)

    def bandwidth(self, start, end, every):
        """Bytes per second in each part of a time: points of seconds since its start and bytes."""
        sums = [0] * (int((end - start) / every) + 1)
        for at, length in zip(self.at, self.bytes, strict=True):
            if start <= at < end:
                sums[int((at - start) / every)] += length
        return [((number + 0.5) * every, total / every) for number, total in enumerate(sums)]


def percentile(took, part):
    """A percentile of sorted times."""
    return took[min(int(len(took) * part), len(took) - 1)] if took else None
