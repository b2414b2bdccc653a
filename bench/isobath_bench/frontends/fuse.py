"""The disk as a file, by FUSE: fio on it, Isobath beside QEMU."""

from .. import plot
from ..rounds import by_case
from . import images, load, paired, served

LOADS = {
    "4 KiB random read, qd 1": dict(rw="randread", depth=1, engine="psync"),
    "4 KiB random read, qd 32": dict(rw="randread", depth=32),
    "4 KiB random write, qd 1": dict(rw="randwrite", depth=1, engine="psync"),
    "4 KiB random write, qd 32": dict(rw="randwrite", depth=32),
    "1 MiB read, qd 4": dict(rw="read", block="1m", depth=4),
    "1 MiB write, qd 4": dict(rw="write", block="1m", depth=4),
    "4 KiB random write and fsync": dict(rw="randwrite", depth=1, engine="psync", extra=["--fsync=1"]),
}


def measure(what, name, seconds):
    image = images.filled("qcow2")
    with served.fuse(name, image, writable=True) as server:
        how = dict(LOADS[what], server=server, direct=True)
        load.fio(server.socket, **how, seconds=1)
        return load.fio(server.socket, **how, seconds=seconds)


def run(rounds, seconds):
    qemu = served.qemu_name()
    names = [served.ISOBATH, qemu]
    samples = by_case(rounds, [(what,) for what in LOADS], names, lambda *key: measure(*key, seconds))
    rows, goals, bars = [], [], {}
    for what in LOADS:
        own, peer = ((what, name) for name in names)
        for key in (own, peer):
            rows.append(
                [
                    *key,
                    samples.text(key, "iops"),
                    samples.text(key, "bytes_per_second", factor=2**-20),
                    samples.text(key, "server_cpu_us", "{:.1f}"),
                    samples.text(key, "p50_us", "{:,.1f}"),
                    samples.text(key, "p99_us", "{:,.1f}"),
                ]
            )
        bars[what] = {name: samples.median((what, name), "iops") for name in names}
        goals.append(paired.goal(samples, f"FUSE, {what}: requests a second ÷ {qemu}", own, peer, "iops", at_least=1.5))
    table = {
        "title": "FUSE",
        "text": "One layer, data in every cluster, page cache behind the server; fio opens the file with O_DIRECT.",
        "columns": ["load", "server", "IOPS", "MiB/s", "server's CPU µs per request", "median µs", "p99 µs"],
        "rows": rows,
    }
    figure = plot.bars("frontends-fuse.svg", "A disk as a file, by FUSE", "requests a second", bars, log=True)
    return paired.part(samples, [table], goals, [figure])
