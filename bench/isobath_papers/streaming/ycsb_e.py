"""RocksDB under YCSB's scans and inserts while its disk's chain is streamed: the dissertation's evaluation with an
application."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path

from isobath_bench import tools
from isobath_bench.depth import chains
from isobath_bench.flush import mounts

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import disks, memory, ycsb
from ..verdict import Cause, compared
from . import beside, pictures
from .beside import ADAPTIVE, DISSERTATION, ISOBATH, NONE, NORMAL, QEMU, Watched

NAME = "ycsb_e"
TITLE = "RocksDB and YCSB while a chain is streamed"
SOURCE = "Adaptive streaming, figures 4.1 and 4.2"

# Printed in section 4.2.2: operations a second, microseconds of a scan.
THROUGHPUT = {NONE: 48.531, NORMAL: 46.131, ADAPTIVE: 49.868}
SCAN = {NORMAL: 30625.532, ADAPTIVE: 28438.563}
# The adaptive job ÷ the normal one, printed: an insert's latency, the job's time, the part of it in which it is active.
INSERT, RUNTIME, ACTIVE = 1.0064, 1.7167, 1 - 0.3505
# The adaptive job ÷ none, printed.
SCAN_BESIDE, INSERT_BESIDE = 1 - 0.0258, 1 - 0.0173

LAYERS = 30
# The guest's memory: more than the database has, as the dissertation's, or less, so that scans come from the disk.
ALL, SOME = "in memory", "on disk"
MODES = [(QEMU, NONE), (QEMU, NORMAL), (ISOBATH, NONE), (ISOBATH, NORMAL), (ISOBATH, DISSERTATION), (ISOBATH, ADAPTIVE)]
KEYS = [(*each, memory) for memory in (ALL, SOME) for each in MODES if memory == SOME or each != (ISOBATH, NORMAL)]
# Fields of a sample, as parts of what they are without a job: what the dissertation has of them by mode.
FIGURE = {
    "throughput": (
        "operations a second",
        {NORMAL: THROUGHPUT[NORMAL] / THROUGHPUT[NONE], ADAPTIVE: THROUGHPUT[ADAPTIVE] / THROUGHPUT[NONE]},
    ),
    "scan_us": ("a scan's latency", {NORMAL: SCAN_BESIDE * SCAN[NORMAL] / SCAN[ADAPTIVE], ADAPTIVE: SCAN_BESIDE}),
    "insert_us": ("an insert's latency", {NORMAL: INSERT_BESIDE / INSERT, ADAPTIVE: INSERT_BESIDE}),
}
FIELDS = {"fields": 150, "field_bytes": 150}
OURS = (ISOBATH, ADAPTIVE)


# Why ratios differ.
NO_GAIN = (
    "A job cannot make a guest faster; the paper's gain over no job is about what its runs differ by (a standard"
    " deviation of 2.3 %)."
)
IN_MEMORY = (
    "With the database in memory guest and job contend for two processors, not for the disk, and pacing looks at the"
    " disk alone."
)
INSERTS = "An insert goes to memory and to a log in the page cache; what it takes is the processor's time."
FREE = "With the database in memory the disk is free, so the adaptive job hardly pauses: its active time is its time."


def records(profile):
    return profile.of(400, 7_500)


def size(profile):
    """Bytes of the disk."""
    return profile.of(128, 512) << 20


def guest_memory(profile, kind):
    """Bytes."""
    return (profile.of(64, 400) if kind == ALL else profile.of(32, 160)) << 20


def longest_scan(profile):
    """Records; scans are of one to that."""
    return profile.of(100, 1000)


def most(profile):
    """Seconds that a job is given."""
    return profile.of(2, 60)


def points(profile):
    return [Point(key, seconds=profile.of(1.2, 12)) for key in KEYS]


def loaded(profile):
    """The top of a chain below the active layer which holds a database; made unless it is there."""
    layers = LAYERS - 1
    name = f"ycsb-{records(profile)}-{layers}-layers"
    directory, raw = tools.WORK / name, tools.WORK / "ycsb.raw"

    def generate():
        raw.unlink(missing_ok=True)
        try:
            tools.run("truncate", f"--size={size(profile)}", raw)
            with mounts.attached(raw, make=disks.MAKE) as (_, mount):
                ycsb.run("load", mount / "db", records=records(profile), **FIELDS)
                # RocksDB deletes what is left of its compactions when it opens; that is no data of the chain's.
                ycsb.run("run", mount / "db", records=records(profile), workload="c", operations=1, **FIELDS)
                tools.run("fstrim", mount)
            chains.generate(directory, layers, "--data", f"raw:{raw}")
        finally:
            raw.unlink(missing_ok=True)

    return chains.kept(directory, layers, generate)


@contextlib.contextmanager
def setting(profile):
    with beside.place(LAYERS - 1, size(profile), 0, made=loaded(profile)) as place:
        yield beside.Setting(profile, place)


def measure(setting, point, number):
    del number
    contender, mode, kind = point.key
    profile = setting.profile
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(setting.place.active())
        server, qmp = stack.enter_context(beside.served(contender, image))
        directory = stack.enter_context(disks.mounted(server, make=None)).directory
        limit = stack.enter_context(memory.limited(guest_memory(profile, kind)))
        options = {"records": records(profile), "workload": "scan70", "scan_length": longest_scan(profile), **FIELDS}
        # The guest's memory is full when the job begins.
        limit.run("sh", "-c", f"cat {directory}/db/*.sst > /dev/null")
        before, began = beside.moved(setting.place.device), time.monotonic()
        ycsb.run("run", directory / "db", prefix=limit.prefix, seconds=profile.of(0.1, 2), **options)
        rate = (beside.moved(setting.place.device) - before) / (time.monotonic() - began)
        before = beside.moved(setting.place.device)
        load = Load(limit, directory / "db", options)
        try:
            load.wait()
            job = None
            if mode == NONE:
                time.sleep(profile.of(0.5, 6))
            else:
                arguments = beside.told(contender, mode, threshold=beside.THRESHOLD * rate, hurry=profile.of(40, 10))
                job = Watched(qmp, most(profile), arguments)
        finally:
            found = load.stop()
        return sample(found, job, beside.moved(setting.place.device) - before)


class Load:
    """YCSB, running."""

    def __init__(self, limit, directory, options):
        command = [*limit.prefix, *ycsb.command("run", directory, seconds=3600, seed=2, **options)]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self):
        """Until it works: it then has a handler for being told to end."""
        while self.process.poll() is None and not catches(self.process.pid, signal.SIGTERM):
            time.sleep(0.002)

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


def catches(process, number):
    """Whether a process has a handler of a signal."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16) >> (number - 1) & 1 == 1
    return False


def sample(found, job, moved):
    """Operations a second, latencies in microseconds, seconds of the job, bytes that the disk moved."""
    running, scan = job.running(job.began) if job else [], found.get("scan", {})
    return {
        "throughput": found["ops_per_second"],
        "operations": found["operations"],
        "scan_us": scan.get("mean_us"),
        "insert_us": found.get("insert", {}).get("mean_us"),
        "scan_p99_us": scan.get("p99"),
        "seconds": job.seconds if job else found["seconds"],
        "finished": job is None or job.finished,
        "active": beside.length(running),
        "usrr": beside.length(running) / job.seconds if job else None,
        "moved": moved,
        "scans": scan.get("count", 0),
    }


def section(results):
    profile = results.profile
    return Section(
        paper=(
            "YCSB's workload E with 70 % scans and 30 % inserts on RocksDB, 15,000 records of 150 fields of 150 bytes,"
            " in a guest of 4 GB that thus has all of them in memory; 30 snapshots are streamed. A normal job takes 5 %"
            " of the throughput, the adaptive one none of it, and 1.72 times as long, of which it is active for 35 %"
            " less time."
        ),
        ours=(
            f"The same workload by a load generator in C, one thread, {records(profile):,} records, scans of up to"
            f" {longest_scan(profile):,}. RocksDB lies on ext4 on the disk (by way of NBD), in a chain of {LAYERS}"
            " layers with random owners of its clusters, without the host's page cache on a simulated disk"
            f" ({beside.about()}). A memory cgroup is the guest's memory: {guest_memory(profile, ALL) >> 20} MiB, with"
            f" the whole database in it, as in the paper (*in memory*), and {guest_memory(profile, SOME) >> 20} MiB,"
            f" less than the database has (*on disk*): without a job {from_disk(results)} of what is scanned comes from"
            " the disk. YCSB runs for as long as the job, and with none for a fixed time. A ratio of isobath to QEMU"
            " has in it what the two differ by without a job; figure 4.1 has each as a part of its own."
        ),
        parts=[table(results), figure_bars(results), times(results)],
        verdicts=[verdict for kind in (ALL, SOME) for verdict in verdicts(results, kind)],
    )


def from_disk(results):
    """About what part of the scanned bytes comes from the disk, as text."""
    key = (ISOBATH, NONE, SOME)
    moved, scans = results.median(key, "moved"), results.median(key, "scans")
    if not scans:
        return "a part"
    # A field has its name and two lengths beside its value.
    record = FIELDS["fields"] * (FIELDS["field_bytes"] + 16)
    return f"about {100 * moved / (scans * longest_scan(results.profile) / 2 * record):.0f} %"


def table(results):
    rows = []
    for key in KEYS:
        rows.append(
            [
                key[2],
                *key[:2],
                results.text(key, "throughput", "{:,.1f}"),
                results.ratio_text(key, beside.without_job(key), "throughput"),
                results.text(key, "scan_us", "{:,.2f}", 1e-3),
                results.text(key, "scan_p99_us", "{:,.1f}", 1e-3),
                results.text(key, "insert_us", "{:,.2f}", 1e-3),
                *(
                    ["-", "-"]
                    if key[1] == NONE
                    else [pictures.took(results, key), results.text(key, "active", "{:.1f}")]
                ),
            ]
        )
    columns = [
        "database",
        "by",
        "job",
        "operations a second",
        "÷ no job",
        "scan, ms",
        "scan's p99, ms",
        "insert, ms",
        "job's time, s",
        "of which active, s",
    ]
    return Table("YCSB beside a job", columns, rows)


def figure_bars(results):
    """Figure 4.1, as parts of what there is without a job, since the guests differ."""
    title = "YCSB beside a job ÷ without one (figure 4.1)"
    with figures.drawn(results, "fig4-1", title, columns=3, rows=2, width=12, height=7) as (_, axes):
        panels = iter(axes)
        for kind in (ALL, SOME):
            for field, (what, paper) in FIGURE.items():
                groups = {}
                for mode in (NORMAL, DISSERTATION, ADAPTIVE):
                    groups[mode] = {
                        who: results.ratio((who, mode, kind), (who, NONE, kind), field) for who in (QEMU, ISOBATH)
                    } | {"paper": paper.get(mode)}
                panel = next(panels)
                figures.plot_bars(panel, groups, form="{:.2f}")
                panel.set_title(f"{what}, {kind}", fontsize=9)
    return figures.saved(results, "fig4-1", title)


def times(results):
    """Figure 4.2: the job's time, and that of it in which it is active, ÷ the time of QEMU's normal job."""
    groups, paper = {}, {"time": {NORMAL: 1, ADAPTIVE: RUNTIME}, "active": {NORMAL: 1, ADAPTIVE: ACTIVE}}
    for kind in (ALL, SOME):
        for field, what in (("seconds", "time"), ("active", "active")):
            normal = (QEMU, NORMAL, kind)
            groups[f"{what},\n{kind}"] = {
                f"{who}, {mode}": results.ratio((who, mode, kind), normal, field)
                for who, mode, each in KEYS
                if each == kind and mode != NONE
            }
    return figures.bars(
        results,
        "fig4-2",
        "The job's time, and its active part (figure 4.2)",
        "÷ QEMU's normal job",
        groups,
        paper=paper,
        form="{:.2f}",
    )


def verdicts(results, kind):
    ours, normal = (*OURS, kind), (QEMU, NORMAL, kind)

    def against(what, other, field, paper, better, why, cause):
        return compared(results, f"{kind}: {what}", paper, ours, other, field, better, why, cause=cause)

    contended = IN_MEMORY if kind == ALL else beside.DRAINS
    # In memory there are two processors to contend for, on disk what the job takes of it.
    contention = Cause.MACHINE if kind == ALL else Cause.OURS
    return [
        against(
            "throughput: adaptive ÷ QEMU's normal job",
            normal,
            "throughput",
            THROUGHPUT[ADAPTIVE] / THROUGHPUT[NORMAL],
            "higher",
            contended,
            contention,
        ),
        against(
            "throughput: adaptive ÷ no job",
            beside.without_job(ours),
            "throughput",
            THROUGHPUT[ADAPTIVE] / THROUGHPUT[NONE],
            "higher",
            NO_GAIN,
            contention,
        ),
        against(
            "a scan's latency: adaptive ÷ QEMU's normal job",
            normal,
            "scan_us",
            SCAN[ADAPTIVE] / SCAN[NORMAL],
            "lower",
            contended,
            contention,
        ),
        against(
            "an insert's latency: adaptive ÷ QEMU's normal job",
            normal,
            "insert_us",
            INSERT,
            "lower",
            INSERTS,
            Cause.MACHINE,
        ),
        against(
            "job's time: adaptive ÷ QEMU's normal job",
            normal,
            "seconds",
            RUNTIME,
            "lower",
            longer(results, kind),
            Cause.SCALE,
        ),
        against(
            "time in which the job is active: adaptive ÷ QEMU's normal job",
            normal,
            "active",
            ACTIVE,
            "lower",
            active(results, kind),
            Cause.OURS,
        ),
    ]


def longer(results, kind):
    """Why an adaptive job takes longer beside this guest than beside the paper's."""
    theirs = results.ratio((ISOBATH, DISSERTATION, kind), (QEMU, NORMAL, kind), "seconds")
    kept = results.ratio((QEMU, NORMAL, kind), (QEMU, NONE, kind), "throughput")
    if theirs is None or kept is None:
        return ""
    return (
        f"This guest needs the disk more than the paper's: QEMU's normal job leaves it {kept * 100:.0f} % of its"
        f" throughput, where the paper's has 95 %. The dissertation's own mode comes to {theirs:.2f}x here."
    )


def active(results, kind):
    """Why an adaptive job is active for longer."""
    theirs = results.ratio((ISOBATH, DISSERTATION, kind), (QEMU, NORMAL, kind), "active")
    kept = results.ratio((*OURS, kind), (ISOBATH, NONE, kind), "throughput")
    if kind == ALL or theirs is None or kept is None:
        return FREE
    return (
        "Beside a busy guest the adaptive job copies small pieces, a few percent of what the disk does, and gets on"
        f" all the time: that counts as active, but the guest has {kept * 100:.0f} % of its throughput. The"
        f" dissertation's mode, which stands still then, comes to {theirs:.2f}x."
    )
