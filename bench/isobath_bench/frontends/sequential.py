"""1 MiB reads and writes in order through vhost-user-blk, 4 at a time, to clusters that have data."""

from ..rounds import by_case
from . import images, load, paired, served
from .paired import DIRECT, PAGE_CACHE

RAW = "raw file"
CASES = [(cache, rw) for cache in (PAGE_CACHE, DIRECT) for rw in ("read", "write")]


def measure(cache, rw, name, seconds):
    direct = cache == DIRECT
    large = dict(rw=rw, block="1m", depth=4, extra=["--size", images.size() // 2])
    if name == RAW:
        return load.raw(images.filled("raw"), direct=direct, **large, seconds=seconds)
    image = images.filled("qcow2")
    with served.vhost_user(name, image, direct=direct, writable=True) as server:
        load.vhost_user(server, **large, seconds=min(seconds, 1))
        return load.vhost_user(server, **large, seconds=seconds)


def run(rounds, seconds):
    names = [RAW, served.ISOBATH, served.qemu_name()]
    samples = by_case(rounds, CASES, names, lambda *key: measure(*key, seconds))
    rows, goals = [], []
    for case in CASES:
        cache, rw = case
        raw = (*case, RAW)
        for name in names:
            key = (*case, name)
            rows.append([
                cache, rw, name, samples.text(key, "bytes_per_second", factor=2**-20),
                paired.text(paired.ratio(samples, key, raw, "bytes_per_second")),
                samples.text(key, "cpu_us", "{:.0f}"), samples.text(key, "server_cpu_us", "{:.0f}"),
            ])  # fmt: skip
        own = (*case, served.ISOBATH)
        goals.append(
            paired.goal(
                samples,
                f"vhost-user-blk, {cache}, 1 MiB {rw}: bytes a second ÷ raw",
                own,
                raw,
                "bytes_per_second",
                at_least=0.97,
            )
        )
    table = {
        "title": "vhost-user-blk: 1 MiB in order, queue depth 4",
        "text": "Writes go to clusters that have data. Raw by isobath-load.",
        "columns": ["cache", "load", "server", "MiB/s", "÷ raw", "CPU µs per I/O", "the server's"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
