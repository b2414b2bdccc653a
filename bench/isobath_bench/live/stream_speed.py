"""How fast a whole chain is streamed into its active layer, nobody else using the disk."""

import contextlib
import time

from .. import plot, report, servers, tools
from ..depth import chains
from ..flush import mounts
from ..rounds import Samples, rotated
from . import served

EXT4, REFLINK = "ext4", "XFS with reflink"
XFS_BYTES = 6 << 30
PLAIN = "dd and a sync"


class Case:
    """A chain on a file system, and what is to be reached there against QEMU."""

    def __init__(self, system, layers, goal):
        self.system = system
        self.layers = layers
        self.goal = goal

    @property
    def name(self):
        return f"{self.layers} layers, {self.system}"


CASES = [Case(EXT4, 30, 3), Case(EXT4, 500, 20), Case(REFLINK, 30, 20)]


def size():
    """Bytes of the disk, nine tenths of them allocated."""
    return (128 << 20) if tools.QUICK else 2 << 30


def patience():
    """The seconds that a job is given; its time is extrapolated where they are not enough."""
    return 10 if tools.QUICK else 45


def measure(name, below, directory):
    """Streams everything below a new overlay into it, and compares it with what it was."""
    chains.warm(below)
    active = directory / "live-overlay.qcow2"
    active.unlink(missing_ok=True)
    tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", active)
    tools.run("sync", "--file-system", directory)
    try:
        with served.serve(name, active) as (server, qmp):
            cpu, began = server.cpu(), time.perf_counter()
            qmp.do(
                "block-stream", device=served.DISK, job_id="stream", pacing="none" if name == served.ISOBATH else None
            )
            ended = qmp.wait_for_job(patience())
            seconds, cpu = time.perf_counter() - began, server.cpu() - cpu
            began = time.perf_counter()
            tools.run("sync", "--file-system", directory)
            settled = time.perf_counter() - began
            done = 1.0
            if ended is None:
                job = qmp.do("query-block-jobs")[0]
                done = job["offset"] / job["len"]
                qmp.do("block-job-cancel", device="stream", force=True)
        if ended is not None:
            equal(active, below)
        return {"seconds": seconds / done, "done": done, "cpu": cpu / done, "settled": settled}
    finally:
        active.unlink()


def equal(active, below):
    """Whether an image holds what the chain held, and by itself."""
    tools.run(tools.ISOBATH, "compare", "--quiet", active, below)
    if "backing file:" in tools.run("qemu-img", "info", active):
        raise tools.Failed(f"{active} still has a backing file")


def write_as_much(below, directory):
    """Writes as many bytes as the stream has to at once, and then syncs them."""
    path = directory / "live-written"
    length = sum(each.stat().st_blocks * 512 for each in below.parent.glob("layer-*.qcow2"))
    try:
        began = time.perf_counter()
        tools.run("dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={length >> 20}", "conv=fsync")
        return {"seconds": time.perf_counter() - began, "done": 1.0}
    finally:
        path.unlink()


@contextlib.contextmanager
def place(case):
    """The chain of a case, and a directory on its file system."""
    below = chains.make(case.layers, size=size())
    if case.system == EXT4:
        yield below, tools.WORK
        return
    image = tools.WORK / "live-XFS.img"
    image.unlink(missing_ok=True)
    tools.run("truncate", f"--size={XFS_BYTES}", image)
    try:
        with mounts.attached(image, make=["mkfs.xfs", "-q", "-f", "-K"]) as (_, directory):
            there = directory / below.parent.name
            tools.run("cp", "-r", "--sparse=always", below.parent, there)
            yield there / below.name, directory
    finally:
        image.unlink(missing_ok=True)


def everybody(case):
    """Who is measured: QEMU 10 and dd where they say something that another case does not."""
    if case.layers > 30:
        return served.names()[:2]
    return [PLAIN, *(served.names() if case.system == EXT4 else served.names()[:2])]


def run(rounds, seconds):
    del seconds
    samples = Samples()
    for case in CASES:
        names = everybody(case)
        with place(case) as (below, directory):
            for number in range(max((rounds + 1) // 2, 1)):
                for name in rotated(names, number):
                    key = (case.name, name)
                    # Once is enough for what takes all of its time box.
                    if samples.median(key, "done") not in (None, 1.0):
                        continue
                    if name == PLAIN:
                        samples.attempt(key, lambda: write_as_much(below, directory))
                    else:
                        samples.attempt(key, lambda: measure(name, below, directory))
    rows, goals, bars = [], [], {}
    megabytes = size() * 0.9 / 1e6
    for case in CASES:
        bars[case.name] = {}
        for name in (PLAIN, *served.names()):
            key = (case.name, name)
            if key not in samples:
                continue
            took = samples.median(key, "seconds")
            own = samples.median((case.name, served.ISOBATH), "seconds")
            done = samples.median(key, "done")
            rows.append(
                [
                    case.name,
                    name,
                    samples.text(key, "seconds", "{:.2f}")
                    + ("" if done in (None, 1.0) else f" ({done * 100:.0f} % done)"),
                    "-" if took is None else f"{megabytes / took:,.0f}",
                    *(samples.text(key, field, "{:.2f}") for field in ("settled", "cpu")),
                    "-" if own is None or took is None else f"{took / own:.1f}x",
                ]
            )
            bars[case.name][name] = took
        peer = next(iter(servers.qemus()))
        own, other = (samples.median((case.name, name), "seconds") for name in (served.ISOBATH, peer))
        why = samples.failure((case.name, peer)) or samples.failure((case.name, served.ISOBATH))
        goals.append(
            report.limit(
                f"stream, {case.name}: {peer}'s time ÷ isobath's", report.ratio(other, own), at_least=case.goal, why=why
            )
        )
    table = {
        "title": "The speed of a stream",
        "text": (
            f"block-stream of a whole chain, {size() * 0.9 / 2**20:,.0f} MiB in clusters of 64 KiB that belong to"
            " random layers, into a new overlay, by isobath (`pacing` none) and qemu-storage-daemon; nobody else uses"
            f" the disk, the chain is in the page cache. *{PLAIN}*: dd's time for as many bytes and a sync. Results are"
            f" compared with the chain. A job that is not done after {patience()} s is cancelled, and its time"
            " extrapolated."
        ),
        "columns": ["chain", "by", "s", "MB/s", "then a sync, s", "server's CPU, s", "÷ isobath's time"],
        "rows": rows,
    }
    figure = plot.bars(
        "live_chains-stream-speed.svg",
        "A whole chain streamed into its active layer",
        "seconds",
        bars,
        log=True,
        unit="s",
    )
    notes = [
        f"{' / '.join(key)}: {sample['why']}" for key, each in samples.items() for sample in each if "why" in sample
    ]
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": notes}
