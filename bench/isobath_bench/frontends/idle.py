"""Disks that nobody uses: 100 of 1 TiB in one `isobath serve`."""

import contextlib
import shutil
import time

from .. import report, servers, tools
from ..rounds import Samples
from . import paired, served

SIZE = 1 << 40
COUNT = 100
NBD, VHOST = "nbd", "vhost-user-blk"


def disks(count):
    """New images of 1 TiB."""
    directory = tools.WORK / "frontends-idle"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    paths = [directory / f"disk-{number:03}.qcow2" for number in range(count)]
    for path in paths:
        tools.run(tools.ISOBATH, "create", "--format", "qcow2", path, SIZE)
    return paths


@contextlib.contextmanager
def serve(frontend, paths):
    """A server of some images, each with a socket of NBD's or of vhost-user-blk's."""
    if frontend == NBD:
        with servers.isobath(paths[0], *paths[1:]) as server:
            yield server
        return
    sockets = [path.with_suffix(".sock") for path in paths]
    command = served.isobath(paths[0], frontend, sockets[0], writable=True)
    for socket, path in zip(sockets[1:], paths[1:]):
        command += [f"--{frontend}", f"unix:{socket}", path]
    with served.Frontend(served.ISOBATH, command, sockets[-1], lambda: served.listens(sockets[-1])) as server:
        yield server


def measure(frontend, paths, seconds):
    with serve(frontend, paths) as server:
        # What the start leaves to do is done.
        time.sleep(1)
        before, began = server.cpu(), time.perf_counter()
        time.sleep(seconds)
        used = server.cpu() - before
        return {"cpu": used / (time.perf_counter() - began), "rss": server.rss()}


def run(rounds, seconds):
    samples = Samples()
    paths = disks(COUNT)
    keys = [(frontend, count) for frontend in (NBD, VHOST) for count in (1, COUNT)]
    for _ in range(rounds):
        for frontend, count in keys:
            samples.attempt((frontend, count), lambda: measure(frontend, paths[:count], max(seconds, 3)))
    shutil.rmtree(paths[0].parent)
    rows = [
        [*key, samples.text(key, "cpu", "{:.2f} %", 100), samples.text(key, "rss", "{:.1f}", 2**-20)] for key in keys
    ]
    goals = []
    for frontend in (NBD, VHOST):
        one, many = (samples.median((frontend, count), "rss") for count in (1, COUNT))
        each = (many - one) / (COUNT - 1) / 2**20 if one and many else None
        cpu = samples.median((frontend, COUNT), "cpu")
        why = samples.failure((frontend, 1)) or samples.failure((frontend, COUNT))
        goals += [
            report.limit(
                f"{COUNT} idle disks, {frontend}: CPU of one core",
                None if cpu is None else cpu * 100,
                at_most=0.1,
                unit="%",
                why=why,
            ),
            report.limit(f"RSS of each idle disk of 1 TiB, {frontend}", each, at_most=2, unit="MiB", why=why),
        ]
    table = {
        "title": "Idle disks of 1 TiB",
        "text": "New images, writable, open in one `isobath serve`, nobody connected. With NBD they share a socket.",
        "columns": ["frontend", "disks", "CPU of one core", "RSS, MiB"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
