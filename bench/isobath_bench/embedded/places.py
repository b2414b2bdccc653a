"""Where images lie: on a simulated disk, or on a file system of their own."""

import contextlib

from .. import tools
from ..flush import mounts

# `isobath serve --slow-disk` of disks that cost nothing.
FREE = "1T,0,65535,0"
SIMULATED = {"hdd": "hdd", "ssd": "ssd", "free": FREE}


class Place:
    """A directory for images, and the simulated disk that holds it, if one does."""

    def __init__(self, name, directory, slow=None):
        self.name = name
        self.directory = directory
        self.slow = slow

    def options(self):
        """What `isobath serve` is told to be on this disk."""
        return ["--slow-disk", self.slow] if self.slow else []

    def settle(self):
        """Writes back what is dirty, so that it does not come in between later."""
        tools.run("sync", "--file-system", self.directory)


@contextlib.contextmanager
def place(name):
    """A place, empty at first. Simulated disks lie in memory, so that no real one shows through."""
    if name not in SIMULATED:
        with mounts.mounted(name, filled=True) as system:
            yield Place(name, system.directory)
        return
    with tools.in_memory("bench") as directory:
        yield Place(name, directory, SIMULATED[name])
