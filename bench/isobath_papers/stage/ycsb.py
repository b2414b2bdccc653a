"""YCSB's core workloads on RocksDB, by the load generator of bench/ycsb."""

import json
from functools import cache

from isobath_bench import tools


@cache
def program():
    """The load generator; made unless it is up to date."""
    path = tools.TARGET / "papers" / "ycsb"
    tools.run("make", "--silent", f"--directory={tools.ROOT / 'bench' / 'ycsb'}", f"OUT={path}")
    return path


def command(what, directory, **options):
    """The command for `load` or `run` on a directory; `cache_bytes=` becomes `--cache-bytes`."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [program(), what, "--dir", directory, *words]


def run(what, directory, *, prefix=(), **options):
    """Runs a `command`, with `prefix` before it, and gives the figures: operations, seconds, ops_per_second, and for
    each kind of operation count, mean_us, p50, p95 and p99."""
    return json.loads(tools.run(*prefix, *command(what, directory, **options)))
