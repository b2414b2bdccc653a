"""Warm reads: random IOPS, CPU, sequential throughput and memory by depth."""

from .. import fio, plot, report, servers, tools
from ..rounds import Samples, rotated
from . import chains

DEPTHS = {chains.ISOBATH: [1, 50, 500, 1000, 10000], chains.INDEXED: [1, 1000, 10000]}
QEMU_DEPTHS = [1, 50, 500, 1000]
SMALL = dict(rw="randread", block="4k", depth=32)
LARGE = dict(rw="read", block="1m", depth=4)


def measure(name, layers, seconds):
    """One server on one chain: a whole pass first (QEMU: a second of random reads), then the loads."""
    active = chains.make(layers, indexed=name == chains.INDEXED)
    chains.warm(active)
    own = name in (chains.ISOBATH, chains.INDEXED)
    if not own and layers >= 500:
        seconds = min(seconds, 2)
    with chains.server(name, active) as server:
        try:
            sample = {}
            if own:
                tools.run("nbdcopy", "--no-extents", server.uri, "null:")
                sample["rss_after_pass"] = server.rss()
            else:
                fio.load(server, **SMALL, seconds=1)
            small = fio.load(server, **SMALL, seconds=seconds)
            large = fio.load(server, **LARGE, seconds=seconds)
        except tools.Failed as error:
            status = server.process.poll()
            if status is not None and status < 0:
                raise servers.Crashed(f"{name} crashed under load: signal {-status}") from error
            raise
        return sample | {
            "iops": small["iops"],
            "cpu_us": small["cpu_us_per_request"],
            "p99_us": small["p99_us"],
            "sequential": large["bytes_per_second"],
            "peak_rss": server.peak_rss(),
        }


def run(rounds, seconds):
    samples = Samples()
    keys = [(name, layers) for name in chains.names() for layers in DEPTHS.get(name, QEMU_DEPTHS)]
    for number in range(rounds):
        for key in rotated(keys, number * 5):
            samples.attempt(key, lambda: measure(*key, seconds))
    rows = []
    for name, layers in keys:
        key, one = (name, layers), (name, 1)

        def beside(field, form="{:,.0f}", factor=1.0):
            quotient = report.ratio(samples.median(key, field), samples.median(one, field))
            text = samples.text(key, field, form, factor)
            return text if quotient is None else f"{text} ({quotient:.2f}x)"

        rows.append([
            name, f"{layers:,}", beside("iops"), beside("cpu_us", "{:,.2f}"),
            beside("sequential", factor=2**-20), beside("rss_after_pass", factor=2**-20),
            beside("peak_rss", factor=2**-20),
        ])  # fmt: skip

    def goal(what, name, layers, field, **bound):
        quotient = report.ratio(samples.median((name, layers), field), samples.median((name, 1), field))
        return report.limit(what, quotient, **bound, why=samples.failure((name, layers)))

    goals = []
    for name in filter(chains.names().__contains__, (chains.ISOBATH, chains.INDEXED)):
        goals.append(goal(f"4 KiB random reads, 1,000 layers ÷ 1 ({name})", name, 1000, "iops", at_least=0.95))
        if 10000 in DEPTHS[name]:
            goals.append(goal(f"4 KiB random reads, 10,000 layers ÷ 1 ({name})", name, 10000, "iops", at_least=0.9))
        goals += [
            goal(f"server CPU per I/O, 1,000 layers ÷ 1 ({name})", name, 1000, "cpu_us", at_most=1.05),
            goal(f"1 MiB sequential reads, 1,000 layers ÷ 1 ({name})", name, 1000, "sequential", at_least=0.9),
            goal(f"RSS after a whole pass, 1,000 layers ÷ 1 ({name})", name, 1000, "rss_after_pass", at_most=1.25),
        ]  # fmt: skip

    def curve(field, factor=1.0):
        def points(name):
            depths = [layers for other, layers in keys if other == name]
            values = [(layers, samples.median((name, layers), field)) for layers in depths]
            return [(x, y * factor) for x, y in values if y is not None]

        return {name: points(name) for name in chains.names()}

    ticks = [1, 10, 50, 100, 500, 1000, 10000]
    shape = dict(log_x=True, log_y=True, x_ticks=ticks)
    figures = [
        plot.lines(
            "chain_depth-iops.svg",
            "4 KiB random reads, queue depth 32, page cache",
            "layers",
            "IOPS",
            curve("iops"),
            **shape,
        ),
        plot.lines("chain_depth-cpu.svg", "Server CPU per 4 KiB read", "layers", "µs", curve("cpu_us"), **shape),
        plot.lines(
            "chain_depth-sequential.svg",
            "1 MiB sequential reads, queue depth 4, page cache",
            "layers",
            "MiB/s",
            curve("sequential", 2**-20),
            **shape,
        ),
        plot.lines(
            "chain_depth-memory.svg",
            "Peak memory (RSS) of the server",
            "layers",
            "MiB",
            curve("peak_rss", 2**-20),
            **shape,
        ),
    ]
    table = {
        "title": "Reads by depth",
        "text": (
            f"A disk of {chains.disk_size() >> 20:,} MiB, 90 % of it in clusters of 64 KiB that belong to "
            "random layers, page cache warm; in brackets ÷ one layer."
        ),
        "columns": [
            "server",
            "layers",
            "4 KiB random IOPS",
            "CPU µs per I/O",
            "1 MiB sequential MiB/s",
            "RSS after a whole pass, MiB",
            "peak RSS, MiB",
        ],
        "rows": rows,
    }
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": figures,
        "notes": chains.no_index_note(),
    }
