"""What a disk's reads of 4 KiB alone take longer while another disk of the same server is flooded.

The flood is as heavy where each disk has a server of its own, and takes as much of the processors: the difference is
what the disks of one server share.
"""

import subprocess
from contextlib import ExitStack

from .. import tools
from ..rounds import Samples, rotated
from . import images, load, paired, served

ALONE, APART, TOGETHER, ONE_THREAD = "no flood", "two servers", "one server", "one server, one thread"
FLOODS = {"4 KiB": dict(block="4k", depth=128), "1 MiB": dict(block="1m", depth=16)}
MOST = 2


def place(number):
    path = tools.WORK / f"neighbour-{number}.sock"
    path.unlink(missing_ok=True)
    return path


def servers(stack, how, image):
    """Starts the servers; gives that of the disk which is measured, and the sockets of both disks."""
    quiet, flooded = place(0), place(1)
    options = ["--vhost-user-blk", f"unix:{quiet}"]
    of_other = ["--vhost-user-blk", f"unix:{flooded}"]
    command = [tools.ISOBATH, "serve", "--read-only"]

    def start(more, *places):
        ready = lambda: all(served.listens(path) for path in places)  # noqa: E731
        return stack.enter_context(served.Frontend(served.ISOBATH, [*command, *more], places[0], ready))

    if how in (ALONE, APART):
        server = start([*options, image], quiet)
        if how == APART:
            start([*of_other, image], flooded)
        return server, flooded
    threads = ["--threads", "1"] if how == ONE_THREAD else []
    return start([*options, *of_other, *threads, image, image], quiet, flooded), flooded


def measure(flood, how, seconds):
    image = images.chain(1)
    images.warm(image)
    with ExitStack() as stack:
        server, flooded = servers(stack, how, image)
        load.vhost_user(server, depth=1, seconds=min(seconds, 1))
        if how != ALONE:
            shape = load.shape(**FLOODS[flood], seconds=seconds + 2)
            flooding = subprocess.Popen(
                [str(part) for part in (load.ISOBATH_LOAD, "vhost-user", flooded, *shape)], stdout=subprocess.DEVNULL
            )
            stack.callback(flooding.wait)
            stack.callback(flooding.terminate)
        return load.vhost_user(server, depth=1, seconds=seconds)


def run(rounds, seconds):
    samples = Samples()
    keys = [(flood, how) for flood in FLOODS for how in (ALONE, APART, TOGETHER, ONE_THREAD)]
    for number in range(rounds):
        for key in rotated(keys, number):
            samples.attempt(key, lambda: measure(*key, seconds))
    rows, goals = [], []
    for key in keys:
        flood, how = key
        rows.append(
            [
                flood, how, samples.text(key, "p50_us", "{:.1f}"), samples.text(key, "p99_us", "{:.1f}"),
                paired.text(paired.ratio(samples, key, (flood, APART), "p99_us")),
            ]
        )  # fmt: skip
        if how in (TOGETHER, ONE_THREAD):
            what = f"vhost-user-blk, {how}: p99 beside a disk flooded by {flood} reads ÷ two servers"
            goals.append(paired.goal(samples, what, key, (flood, APART), "p99_us", at_most=MOST))
    table = {
        "title": "vhost-user-blk: a disk beside one that is flooded",
        "text": (
            "4 KiB random reads, one at a time, of one disk, while the other has 128 reads of 4 KiB or 16 of 1 MiB in"
            " flight. One layer, page cache."
        ),
        "columns": ["flood", "servers", "median µs", "p99 µs", "p99 ÷ two servers"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
