"""4 KiB random reads through vhost-user-blk by the number of queues, each with a thread of the client's."""

import os

from .. import report
from ..rounds import Samples, rotated
from . import images, load, paired, served

RAW = "raw file"


def queues():
    return [count for count in (1, 2, 4, 8) if count <= (os.cpu_count() or 1)]


def measure(name, count, seconds):
    if name == RAW:
        images.warm(images.raw())
        return load.raw(images.raw(), queues=count, seconds=seconds)
    image = images.chain(1)
    images.warm(image)
    with served.vhost_user(name, image, queues=count) as server:
        load.vhost_user(server, queues=count, seconds=min(seconds, 1))
        return load.vhost_user(server, queues=count, seconds=seconds)


def run(rounds, seconds):
    samples = Samples()
    keys = [(name, count) for name in (RAW, served.ISOBATH, served.qemu_name()) for count in queues()]
    for number in range(rounds):
        for key in rotated(keys, number):
            samples.attempt(key, lambda: measure(*key, seconds))
    rows = [
        [
            *key, samples.text(key, "iops"), paired.text(paired.ratio(samples, key, (key[0], 1), "iops")),
            samples.text(key, "cpu_us", "{:.2f}"), samples.text(key, "server_cpu_us", "{:.2f}"),
        ]
        for key in keys
    ]  # fmt: skip
    goals = []
    if len(queues()) > 1:
        own, one = (served.ISOBATH, 2), (served.ISOBATH, 1)
        each = paired.ratio(samples, one, own, "server_cpu_us")
        what = "vhost-user-blk, 2 queues ÷ 1 queue: reads for the CPU time of as many cores of the server alone"
        why = samples.failure(own) or samples.failure(one)
        goals.append(report.limit(what, each and 2 * each, at_least=1.8, why=why))
    table = {
        "title": "vhost-user-blk by queues: 4 KiB random reads, queue depth 32 in each",
        "text": (
            f"One layer, page cache, {os.cpu_count()} cores for the client and the server together. QEMU serves all"
            " queues in one thread."
        ),
        "columns": ["server", "queues", "IOPS", "÷ one queue", "CPU µs per I/O", "the server's"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
