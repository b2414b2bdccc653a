"""A block-stream job beside a guest, on a slow disk that both need: who loses what."""

import contextlib
import time

from isobath_bench import tools
from isobath_bench.depth import chains
from isobath_bench.live import guest
from isobath_bench.live.control import Qmp

from ..stage import disks, slow

KIND = "ssd"
FILL = 0.9
# Bytes of a guest's part of the disk.
PART = 128 << 20
ISOBATH, QEMU = "isobath", "QEMU"
# What a job is told; the adaptive one is isobath's default.
NONE, NORMAL, LIMIT, DISSERTATION, ADAPTIVE = "no job", "normal", "speed limit", "dissertation's", "adaptive"
# The dissertation's mode: its first look at the guest, its pauses (seconds), and its threshold as a part of what it
# saw.
LOOK, PAUSE, THRESHOLD = 15, 1, 0.3
# Why a guest may lose something, beside an adaptive job and beside QEMU's.
DRAINS = (
    "A burst's first requests wait for the pieces that the job has under way, up to 15 ms, and beside a busy guest the"
    " job takes 2 %."
)
ONE_PIECE = (
    "QEMU copies one piece of at most 512 KiB at a time: how much of a disk that takes depends on the disk's latency"
    " and on its queue."
)
# How often a job is asked how far it is, and how long it may stand still and count as running, in seconds.
POLL, STILL = 0.01, 0.04


def without_job(key):
    """The key of the same contender and circumstances without a job."""
    return key[0], NONE, *key[2:]


def about():
    """The disk that all images lie on."""
    return slow.ABOUT[KIND]


class Place:
    """A chain on a slow disk, and a guest's part of the disk behind it. Sizes are bytes."""

    def __init__(self, device, below, data, part):
        self.device = device
        self.below = below
        self.data = data
        self.part = part

    @property
    def directory(self):
        return self.device.directory

    @contextlib.contextmanager
    def active(self):
        """A new active layer that holds all of the guest's part, so that nothing of what it writes has to be copied."""
        path = self.below.with_name("active.qcow2")
        path.unlink(missing_ok=True)
        tools.run(
            tools.ISOBATH,
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            self.below.name,
            "-F",
            "qcow2",
            path,
            self.data + self.part,
        )
        if self.part:
            tools.run("qemu-io", "-t", "none", "-f", "qcow2", "-c", f"write -q -P 7 {self.data} {self.part}", path)
        try:
            self.device.settle()
            yield path
        finally:
            # The image, and what a job that was cancelled may have left beside it.
            for each in path.parent.glob(f"{path.name}*"):
                each.unlink()


class Setting:
    """What the points of an experiment share."""

    def __init__(self, profile, place):
        self.profile = profile
        self.place = place


@contextlib.contextmanager
def place(layers, data, part, made=None):
    """A chain of so many layers below the active one on a slow disk; `made` is the top of one that is to be taken."""
    made = made or chains.make(layers, size=data, fill=f"{round(FILL * 100)}%")
    with slow.device(KIND, 2 * (data + part) + (1 << 30)) as device:
        tools.run("cp", "-r", "--sparse=always", made.parent, device.directory)
        yield Place(device, device.directory / made.parent.name / made.name, data, part)


@contextlib.contextmanager
def setting(profile, layers, data, kind=Setting):
    """A setting whose chain has so many layers with `data` bytes below the active one, and the guest's part behind
    them."""
    with place(layers, data, profile.of(8 << 20, PART)) as there:
        yield kind(profile, there)


@contextlib.contextmanager
def served(contender, image):
    """An image's disk without the page cache: the server, and QMP."""
    control = tools.WORK / "streaming.qmp"
    control.unlink(missing_ok=True)
    if contender == ISOBATH:
        options = ["--qmp", f"unix:{control}"]
    else:
        options = ["--chardev", f"socket,id=control,path={control},server=on,wait=off", "--monitor", "chardev=control"]
    try:
        with disks.serve(contender, image, *options, cache="none") as server, Qmp(control) as qmp:
            yield server, qmp
    finally:
        control.unlink(missing_ok=True)


def told(contender, mode, *, speed=0, threshold=0, hurry=1, deadline=None):
    """What block-stream is told in a mode; `speed` and `threshold` are bytes per second, `hurry` how many times
    as fast as the dissertation's time goes, `deadline` seconds."""
    if contender == QEMU:
        return {"speed": speed} if mode == LIMIT else {}
    return {
        NORMAL: {"pacing": "none"},
        LIMIT: {"pacing": "none", "speed": speed},
        DISSERTATION: {"adaptive-stream": True, "adaptive-threshold": max(threshold, 2), "pause-time": PAUSE / hurry},
        ADAPTIVE: {"deadline": deadline},
    }[mode]


class Watched:
    """A job that was watched: when it began and ended, since the epoch, and when it was seen to get on."""

    def __init__(self, qmp, most, arguments):
        self.began = time.time()
        self.steps = [(self.began, 0)]
        qmp.do("block-stream", device=disks.EXPORT, job_id="stream", **arguments)
        self.finished = False
        while not self.finished and time.time() < self.began + most:
            self.finished = qmp.wait_for_job(POLL) is not None
            for job in [] if self.finished else qmp.do("query-block-jobs"):
                if job["offset"] != self.steps[-1][1]:
                    self.steps.append((time.time(), job["offset"]))
        self.end = time.time()
        if self.finished:
            self.steps.append((self.end, None))
        else:
            qmp.do("block-job-cancel", device="stream", force=True)

    @property
    def seconds(self):
        return self.end - self.began

    def running(self, origin):
        """When it got on: parts of the time since `origin`, in seconds."""
        found = []
        for at, _ in self.steps[1:]:
            if found and at - found[-1][1] <= STILL:
                found[-1][1] = at
            else:
                found.append([max(at - POLL, self.began), at])
        return [[round(start - origin, 3), round(end - origin, 3)] for start, end in found]


def overlap(one, other):
    """The time that two lists of parts of it have in common."""
    return sum(max(min(end, until) - max(start, since), 0) for start, end in one for since, until in other)


def length(parts):
    return sum(end - start for start, end in parts)


def moved(device):
    """Bytes that a disk has read and written."""
    counts = device.requests()
    return (counts["sectors"] + counts["sectors_read"]) * 512


def wait_for_activity(device, seconds=30):
    """Until the guest's first requests have reached the disk."""
    first, until = moved(device), time.monotonic() + seconds
    while moved(device) < first + (1 << 20):
        if time.monotonic() > until:
            raise tools.Failed("the guest does not begin")
        time.sleep(0.002)


def measure(there, contender, mode, schedule, *, lead, most, after=0.0, hurry=1, speed=0, deadline=None):
    """A job in a mode beside a guest that keeps a schedule. The guest works for `lead` seconds before the job begins,
    the job is given `most` seconds, and the guest works for `after` seconds more. Without a job all is as if one took
    `most` seconds.
    """
    with there.active() as image, served(contender, image) as (server, qmp):
        fio = guest.Guest(server, schedule, there.data, there.part, name="papers")
        job = None
        try:
            wait_for_activity(there.device)
            before = moved(there.device)
            time.sleep(lead)
            threshold = THRESHOLD * (moved(there.device) - before) / lead
            began = time.time()
            if mode == NONE:
                time.sleep(most)
            else:
                job = Watched(
                    qmp, most, told(contender, mode, speed=speed, threshold=threshold, hurry=hurry, deadline=deadline)
                )
            end = time.time()
            time.sleep(after)
        finally:
            requests = fio.stop()
        return sample(requests, schedule, began, end, job, after) | {"threshold": threshold}


def sample(requests, schedule, began, end, job, after):
    """What guest and job did. Bandwidth: MB/s of the seconds in which the guest was to work, while the job went on."""
    origin = requests.began
    bursts = [(burst.start, burst.end) for burst in schedule]
    window = [(began - origin, end - origin)]
    busy = [
        (max(start, window[0][0]), min(stop, window[0][1]))
        for start, stop in bursts
        if overlap([(start, stop)], window) > 0
    ]
    total, took = requests.between(began, end)
    running = job.running(origin) if job else []
    until = end + after - origin
    found = {
        "began": began - origin,
        "end": end - origin,
        "seconds": end - began,
        "finished": job is None or job.finished,
        "bandwidth": total / length(busy) / 1e6 if busy else None,
        "busy": length(busy) / (end - began),
        "p99_ms": 1000 * guest.percentile(took, 0.99) if took else None,
        "active": length(running),
        "usrr": length(running) / (end - began),
        "in_bursts": overlap(running, busy) / length(busy) if busy else None,
        "running": running,
        "bursts": [[round(start, 3), round(stop, 3)] for start, stop in bursts],
        "curve": [[round(at, 3), round(rate / 1e6, 1)] for at, rate in requests.bandwidth(origin, origin + until, 0.1)],
    }
    if after:
        rest, _ = requests.between(end, end + after)
        found["bandwidth_after"] = rest / after / 1e6
        found["kept"] = found["bandwidth"] / found["bandwidth_after"] if rest else None
        found["lost_mb"] = (found["bandwidth_after"] - found["bandwidth"]) * (end - began)
    return found
