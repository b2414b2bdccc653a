"""RocksDB under YCSB's scans and inserts while its disk's chain is streamed: the dissertation's evaluation with an application."""

import contextlib
import json
import shutil
import subprocess
import time

from isobath_bench import tools
from isobath_bench.flush import mounts

from .. import figures
from ..page import Section, Table, Verdict
from ..plan import Point
from ..stage import disks, memory, ycsb
from . import beside
from .beside import ADAPTIVE, DISSERTATION, ISOBATH, NONE, NORMAL, QEMU, Watched

NAME = "ycsb_e"
TITLE = "RocksDB and YCSB while a chain is streamed"
SOURCE = "Adaptive streaming, figures 4.1 and 4.2"

# Printed in section 4.2.2: operations a second, microseconds of a scan.
THROUGHPUT = {NONE: 48.531, NORMAL: 46.131, ADAPTIVE: 49.868}
SCAN = {NORMAL: 30625.532, ADAPTIVE: 28438.563}
# The adaptive job ÷ the normal one, printed: an insert's latency, the job's time, the part of it in which it is active.
INSERT, RUNTIME, ACTIVE = 1.0064, 1.7167, 1 - 0.3505

LAYERS = 30
KEYS = [(QEMU, NONE), (QEMU, NORMAL), (ISOBATH, NONE), (ISOBATH, NORMAL), (ISOBATH, DISSERTATION), (ISOBATH, ADAPTIVE)]
FIELDS = {"fields": 150, "field_bytes": 150}
OURS = (ISOBATH, ADAPTIVE)


def records(profile):
    return profile.of(400, 15_000)


def size(profile):
    """Bytes of the disk."""
    return profile.of(128, 1024) << 20


def guest_memory(profile):
    """Bytes."""
    return profile.of(32, 256) << 20


def most(profile):
    """Seconds that a job is given."""
    return profile.of(2, 60)


def points(profile):
    return [Point(key, seconds=profile.of(2, 30), rounds=1) for key in KEYS]


def loaded(profile):
    """The top of a chain below the active layer which holds a database; made unless it is there."""
    layers = LAYERS - 1
    name = f"ycsb-{records(profile)}-{layers}-layers"
    directory, done = tools.WORK / name, tools.WORK / f"{name}.done"
    top = directory / f"layer-{layers - 1:05}.qcow2"
    if not done.exists():
        raw = tools.WORK / "ycsb.raw"
        raw.unlink(missing_ok=True)
        try:
            tools.run("truncate", f"--size={size(profile)}", raw)
            # What RocksDB deletes makes holes: it is no data of the chain's.
            with mounts.attached(raw, make=disks.MAKE, options="noatime,discard") as (_, mount):
                ycsb.run("load", mount / "db", records=records(profile), **FIELDS)
            shutil.rmtree(directory, ignore_errors=True)
            tools.run(tools.ISOBATH, "chain", "generate", "--layers", layers, "--data", f"raw:{raw}", "--seed", 1, directory)
        finally:
            raw.unlink(missing_ok=True)
        done.touch()
    return top


class Setting:
    def __init__(self, profile, place):
        self.profile = profile
        self.place = place


@contextlib.contextmanager
def setting(profile):
    with beside.place(LAYERS - 1, size(profile), 0, made=loaded(profile)) as place:
        yield Setting(profile, place)


def measure(setting, point, number):
    del number
    contender, mode = point.key
    profile = setting.profile
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(setting.place.active())
        server, qmp = stack.enter_context(beside.served(contender, image))
        directory = stack.enter_context(disks.mounted(server, make=None)).directory
        limit = stack.enter_context(memory.limited(guest_memory(profile)))
        options = {"records": records(profile), "workload": "scan70", "scan_length": profile.of(100, 1000), **FIELDS}
        before, began = beside.moved(setting.place.device), time.monotonic()
        # The guest's memory is full when the job begins.
        ycsb.run("run", directory / "db", prefix=limit.prefix, seconds=profile.of(0.3, 4), **options)
        rate = (beside.moved(setting.place.device) - before) / (time.monotonic() - began)
        load = Load(limit, directory / "db", options)
        try:
            job = None
            if mode == NONE:
                time.sleep(profile.of(0.7, 12))
            else:
                arguments = beside.told(contender, mode, speed=0, threshold=beside.THRESHOLD * rate, hurry=profile.of(40, 10))
                job = Watched(qmp, most(profile), arguments)
        finally:
            found = load.stop()
        return sample(found, job, beside.moved(setting.place.device) - before)


class Load:
    """YCSB, running."""

    def __init__(self, limit, directory, options):
        words = [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        command = [*limit.prefix, ycsb.program(), "run", "--dir", directory, "--seconds", "3600", "--seed", "2", *words]
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def stop(self):
        """Ends it, and gives its figures."""
        self.process.terminate()
        try:
            out, error = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired as late:
            self.process.kill()
            self.process.wait()
            raise tools.Failed("YCSB does not end") from late
        if self.process.returncode != 0:
            raise tools.Failed(f"YCSB failed with {self.process.returncode}: {error[-1000:]}")
        return json.loads(out)


def sample(found, job, moved):
    """Operations a second, latencies in microseconds, seconds of the job, bytes that the disk moved."""
    running = job.running(job.began) if job else []
    return {
        "throughput": found["ops_per_second"],
        "operations": found["operations"],
        "scan_us": found["scan"]["mean_us"],
        "insert_us": found["insert"]["mean_us"],
        "scan_p99_us": found["scan"]["p99"],
        "seconds": job.seconds if job else found["seconds"],
        "finished": job is None or job.finished,
        "active": beside.length(running),
        "usrr": beside.length(running) / job.seconds if job else None,
        "moved": moved,
    }
