"""Programs with little memory, as a guest has it: their page cache counts."""

import contextlib
import itertools
import os
from pathlib import Path

from isobath_bench import tools

_numbers = itertools.count()


class Limit:
    """A memory cgroup."""

    def __init__(self, directory):
        self.directory = directory
        # To be put before a command.
        self.prefix = ["sh", "-c", f'echo $$ > {directory}/cgroup.procs && exec "$@"', "sh"]

    def run(self, *command, **options):
        """Runs a command within the limit, and gives its output."""
        return tools.run(*self.prefix, *command, **options)


def _hierarchy():
    """Where memory cgroups are made, and the name of their limit."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(place), "memory.limit_in_bytes"
        if kind == "cgroup2" and "memory" in (Path(place) / "cgroup.subtree_control").read_text().split():
            return Path(place), "memory.max"
    raise tools.Failed(
        "there is no memory cgroup: run as root, with the controller 'memory' enabled at the root of /sys/fs/cgroup"
    )


@contextlib.contextmanager
def limited(limit):
    """A memory cgroup of some bytes; whoever is left in it afterwards goes back."""
    root, name = _hierarchy()
    directory = root / f"isobath-{os.getpid()}-{next(_numbers)}"
    directory.mkdir()
    try:
        (directory / name).write_text(str(limit))
        yield Limit(directory)
    finally:
        for process in (directory / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(process)
        directory.rmdir()
