"""4 KiB random writes through vhost-user-blk, 32 at a time, no flush: over data, and each to a new cluster."""

from .. import tools
from ..rounds import by_case
from . import images, load, paired, served
from .paired import DIRECT, PAGE_CACHE

RAW = "raw file"
DATA, NEW = "clusters with data", "new clusters"
LEAST = {DATA: 0.95, NEW: 0.9}
CASES = [(cache, where) for cache in (PAGE_CACHE, DIRECT) for where in LEAST]
CLUSTER = 64 << 10


def room():
    """Bytes of the disk whose clusters are written once each."""
    return 256 << 20 if tools.QUICK else 8 << 30


def measure(cache, where, name, seconds):
    direct = cache == DIRECT
    form = "raw" if name == RAW else "qcow2"
    image = images.filled(form) if where == DATA else images.empty(form, room())
    once = ["--stride", CLUSTER, "--once"] if where == NEW else []
    small = dict(rw="randwrite", extra=once)
    if name == RAW:
        return load.raw(image, direct=direct, **small, seconds=seconds)
    with served.vhost_user(name, image, direct=direct, writable=True) as server:
        if where == DATA:
            load.vhost_user(server, **small, seconds=min(seconds, 1))
        return load.vhost_user(server, **small, seconds=seconds)


def run(rounds, seconds):
    names = [RAW, served.ISOBATH, served.qemu_name()]
    samples = by_case(rounds, CASES, names, lambda *key: measure(*key, seconds))
    rows, goals = [], []
    for case in CASES:
        cache, where = case
        raw = (*case, RAW)
        for name in names:
            key = (*case, name)
            rows.append([
                cache, where, name, samples.text(key, "iops"), paired.text(paired.ratio(samples, key, raw, "iops")),
                samples.text(key, "cpu_us", "{:.2f}"), samples.text(key, "server_cpu_us", "{:.2f}"),
                samples.text(key, "p50_us"), samples.text(key, "p99_us"),
            ])  # fmt: skip
        own = (*case, served.ISOBATH)
        goals.append(
            paired.goal(
                samples,
                f"vhost-user-blk, {cache}, 4 KiB random writes to {where}: IOPS ÷ raw",
                own,
                raw,
                "iops",
                at_least=LEAST[where],
            )
        )
    table = {
        "title": "vhost-user-blk: 4 KiB random writes, queue depth 32, no flush",
        "text": (
            "New clusters: each of 64 KiB is written once, in random order; raw: the same places of a file that is one"
            " hole. Raw by isobath-load."
        ),
        "columns": ["cache", "to", "server", "IOPS", "÷ raw", "CPU µs per I/O", "the server's", "median µs", "p99 µs"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
