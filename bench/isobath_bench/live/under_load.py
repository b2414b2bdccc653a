"""One block-stream job beside one guest, on a simulated disk."""

import shutil
import time

from .. import tools
from ..depth import chains
from . import guest, served

LAYERS = 30
# Bytes a second, µs a request, requests at a time, µs a flush: one disk for all, so that guest and job
# contend alike wherever this runs.
BANDWIDTH = 200 << 20
SLOW_DISK = f"{BANDWIDTH >> 20}M,150,32,500"
FILL = 0.9
# The guest works in a part of the disk that the active layer holds all of: nothing of what it writes has
# to be copied, with the job or without.
GUEST = 256 << 20

ALONE, BASELINE, NORMAL, LIMIT, THRESHOLD, ADAPTIVE = (
    "alone", "no job", "normal", "speed limit", "threshold", "adaptive",
)  # fmt: skip
# The limit of the dissertation's comparison, as a part of what its guest moved without a job.
SPEED = int(BANDWIDTH * 60 / 335.45)
# The guest has worked this long when the job starts.
LEAD = 0.5


def disk(data):
    """The chain's layers below the active one, and an active one made from them: `data` bytes of disk."""
    below = chains.make(LAYERS - 1, size=data, fill=f"{round(FILL * 100)}%")
    made = below.with_name(f"live-active-{data >> 20}M.qcow2")
    if not made.exists():
        new = made.with_suffix(".new")
        new.unlink(missing_ok=True)
        tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", new, data + GUEST)
        tools.run("qemu-io", "-f", "qcow2", "-c", f"write -q -P 7 {data} {GUEST}", new)
        new.rename(made)
    return made


def told(mode, hurry):
    """What block-stream is told in a mode, the guest's time going `hurry` times as fast as the dissertation's."""
    if mode == LIMIT:
        return {"pacing": "none", "speed": SPEED}
    if mode == THRESHOLD:
        # Its pause is a second.
        return {"adaptive-stream": True, "pause-time": 1 / hurry}
    return {} if mode == ADAPTIVE else {"pacing": "none"}


def measure(mode, schedule, data, most, hurry):
    """The job in a mode beside a guest that keeps a schedule, for at most some seconds; the baseline for
    exactly as long."""
    made = disk(data)
    active = made.with_name("live-disk.qcow2")
    shutil.copyfile(made, active)
    tools.run("sync", active)
    chains.warm(active)
    try:
        with served.isobath(active, "--slow-disk", SLOW_DISK) as (server, qmp):
            beside = None if mode == ALONE else guest.Guest(server, schedule, data, GUEST)
            if beside:
                wait_for_activity(qmp)
                time.sleep(LEAD)
            began, record, ended = time.time(), None, None
            if mode == BASELINE:
                beside.wait(most)
            else:
                qmp.do("block-stream", device=served.DISK, job_id="stream", **told(mode, hurry))
                ended = qmp.wait_for_job(most)
                record = next(
                    each["record"] for each in qmp.do("x-isobath-query-job-records") if each["id"] == "stream"
                )
            end = time.time()
            if mode not in (ALONE, BASELINE) and ended is None:
                qmp.do("block-job-cancel", device="stream", force=True)
            return Run(mode, beside and beside.stop(), began, end, ended is not None, record, data)
    finally:
        active.unlink()


def wait_for_activity(qmp):
    """Until the guest's first request is answered."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        statistics = qmp.do("query-blockstats")[0]["stats"]
        if statistics["rd_operations"] + statistics["wr_operations"] > 0:
            return
        time.sleep(0.002)
    raise tools.Failed("the guest does not begin")


class Run:
    """What the guest and the job did; times are since the guest began."""

    def __init__(self, mode, requests, began, end, finished, record, data):
        self.mode = mode
        self.requests = requests
        self.origin = requests.began if requests else began
        self.start = began - self.origin
        self.end = end - self.origin
        self.finished = finished
        self.record = record
        self.data = data

    @property
    def seconds(self):
        """How long the job took, or was given."""
        return self.end - self.start

    def guest_while(self, start, end):
        """The guest's bytes and its requests' times in a part of its own time."""
        return self.requests.between(self.origin + start, self.origin + end)

    def beside(self, baseline):
        """What of the guest's is measured, and that of a baseline in the same part of its schedule."""
        moved, took = self.guest_while(self.start, self.end)
        moved_alone, took_alone = baseline.guest_while(self.start, self.end)
        p99, p99_alone = guest.percentile(took, 0.99), guest.percentile(took_alone, 0.99)
        return {
            "seconds": self.seconds,
            "finished": self.finished,
            "copied": self.record["job_bytes"],
            "running": self.record["seconds_running"] / self.record["seconds"],
            "guest_bytes": moved,
            "guest_bytes_alone": moved_alone,
            "bandwidth": moved / moved_alone if moved_alone else None,
            "p99_ms": p99 and p99 * 1000,
            "p99_ms_alone": p99_alone and p99_alone * 1000,
            "p99": p99 / p99_alone if p99 and p99_alone else None,
        }

    def curve(self, every=0.25, until=None):
        """The guest's bandwidth over its time, in MB/s."""
        points = self.requests.bandwidth(self.origin, self.origin + (until or self.end), every)
        return [(at, rate / 1e6) for at, rate in points]

    def running(self):
        """When the job ran: parts of the guest's time, and the share of it that the job ran in each."""
        if not self.record:
            return []
        every = self.record["sample_seconds"]
        return [
            (self.start + number * every, self.start + (number + 1) * every, sample["running"])
            for number, sample in enumerate(self.record["samples"])
        ]
