"""Disks that nobody uses: 100 of 1 TiB in one `isobath serve`."""

import shutil
import time

from .. import report, servers, tools
from ..rounds import Samples
from . import paired

SIZE = 1 << 40
COUNT = 100


def disks(count):
    """New images of 1 TiB."""
    directory = tools.WORK / "doors-idle"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    paths = [directory / f"disk-{number:03}.qcow2" for number in range(count)]
    for path in paths:
        tools.run(tools.ISOBATH, "create", "--format", "qcow2", path, SIZE)
    return paths


def measure(paths, seconds):
    with servers.isobath(paths[0], *paths[1:]) as server:
        # What the start leaves to do is done.
        time.sleep(1)
        before, began = server.cpu(), time.perf_counter()
        time.sleep(seconds)
        used = server.cpu() - before
        return {"cpu": used / (time.perf_counter() - began), "rss": server.rss()}


def run(rounds, seconds):
    samples = Samples()
    paths = disks(COUNT)
    for _ in range(rounds):
        for count in (1, COUNT):
            samples.attempt(count, lambda: measure(paths[:count], max(seconds, 3)))
    shutil.rmtree(paths[0].parent)
    one, many = (samples.median(count, "rss") for count in (1, COUNT))
    each = (many - one) / (COUNT - 1) / 2**20 if one and many else None
    rows = [[count, samples.text(count, "cpu", "{:.2f} %", 100), samples.text(count, "rss", "{:.1f}", 2**-20)] for count in (1, COUNT)]
    table = {
        "title": "Idle disks of 1 TiB",
        "text": "New images, writable, open in one `isobath serve` with a socket of NBD; no client.",
        "columns": ["disks", "CPU of one core", "RSS, MiB"],
        "rows": rows,
    }
    cpu = samples.median(COUNT, "cpu")
    goals = [
        report.limit(f"{COUNT} idle disks: CPU of one core", None if cpu is None else cpu * 100, at_most=0.1, unit="%"),
        report.limit("RSS of each idle disk of 1 TiB", each, at_most=2, unit="MiB"),
    ]
    return paired.part(samples, [table], goals)
