"""1 MiB reads and writes in order through vhost-user-blk, 4 at a time, to clusters that have data; and the reads from a
long chain."""

from ..rounds import by_case
from . import images, load, paired, served
from .paired import DIRECT, PAGE_CACHE

RAW = "raw file"
LONG = "isobath, 1,000 layers"
READ, WRITE = "read", "write"
LEAST = {served.ISOBATH: 0.98, LONG: 0.95}
CASES = [(cache, rw) for cache in (PAGE_CACHE, DIRECT) for rw in (READ, WRITE)]


def names(rw):
    return [RAW, served.ISOBATH, *([LONG] if rw == READ else []), served.qemu_name()]


def measure(cache, rw, name, seconds):
    direct = cache == DIRECT
    large = dict(rw=rw, block="1m", depth=4, extra=["--size", images.size() // 2])
    if name == RAW:
        return load.raw(images.filled("raw"), direct=direct, **large, seconds=seconds)
    image = images.chain(1000) if name == LONG else images.filled("qcow2")
    if name == LONG and not direct:
        images.warm(image)
    server = served.ISOBATH if name == LONG else name
    with served.vhost_user(server, image, direct=direct, writable=name != LONG) as server:
        load.vhost_user(server, **large, seconds=min(seconds, 1))
        return load.vhost_user(server, **large, seconds=seconds)


def run(rounds, seconds):
    samples = by_case(rounds, CASES, lambda case: names(case[1]), lambda *key: measure(*key, seconds))
    rows, goals = [], []
    for case in CASES:
        cache, rw = case
        raw = (*case, RAW)
        for name in names(rw):
            key = (*case, name)
            rows.append([
                cache, rw, name, samples.text(key, "bytes_per_second", factor=2**-20),
                paired.text(paired.ratio(samples, key, raw, "bytes_per_second")),
                samples.text(key, "cpu_us", "{:.0f}"), samples.text(key, "server_cpu_us", "{:.0f}"),
            ])  # fmt: skip
        for name, least in LEAST.items():
            if name in names(rw):
                what = f"vhost-user-blk, {cache}, 1 MiB {rw}{', 1,000 layers' if name == LONG else ''}"
                bytes_a_second = f"{what}: bytes a second ÷ raw"
                goals.append(
                    paired.goal(samples, bytes_a_second, (*case, name), raw, "bytes_per_second", at_least=least)
                )
    table = {
        "title": "vhost-user-blk: 1 MiB in order, queue depth 4",
        "text": (
            "Writes go to clusters that have data; of 1,000 layers, each cluster belongs to a random one. Raw by"
            " isobath-load."
        ),
        "columns": ["cache", "load", "server", "MiB/s", "÷ raw", "CPU µs per I/O", "the server's"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
