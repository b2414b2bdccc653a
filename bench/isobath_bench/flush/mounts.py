"""File systems on loop devices: made for a measurement, and gone after it, however it ends."""

import contextlib
import os
import signal
import sys
from pathlib import Path

from .. import tools

# mkfs and mount options of each.
KINDS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"], "noatime"),
    "XFS": (["mkfs.xfs", "-q", "-f"], "noatime"),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "noatime"),
    "btrfs nodatacow": (["mkfs.btrfs", "-q", "-f"], "noatime,nodatacow"),
}
BYTES = 6 << 30


class FileSystem:
    """A mounted file system, and the loop device under it."""

    def __init__(self, kind, directory, device):
        self.kind = kind
        self.directory = directory
        self.device = device

    def settle(self):
        """Writes back what is dirty, so that it does not come in between later."""
        tools.run("sync", "--file-system", self.directory)


def _clean(image, directory):
    """Takes away what a run left behind."""
    if os.path.ismount(directory):
        tools.run("umount", directory)
    for line in tools.run("losetup", "--associated", image).splitlines() if image.exists() else ():
        tools.run("losetup", "--detach", line.split(":")[0])
    image.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(kind, filled=False):
    """A new, empty file system of a kind. `filled`: its backing file has all its blocks written, so that
    the file system below it takes no part in the time of a flush."""
    make, options = KINDS[kind]
    name = f"flush-{kind.replace(' ', '-')}"
    image, directory = tools.WORK / f"{name}.img", tools.WORK / name
    directory.mkdir(parents=True, exist_ok=True)
    # A signal that ends the run unwinds as an interrupt from the keyboard does.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: ended by a signal"))
    _clean(image, directory)
    try:
        if filled:
            tools.run("dd", "if=/dev/zero", f"of={image}", "bs=4M", f"count={BYTES >> 22}", "conv=fsync")
        else:
            tools.run("truncate", f"--size={BYTES}", image)
        device = tools.run("losetup", "--find", "--show", image).strip()
        # Discards of a new file system would make holes.
        keep = {"mkfs.ext4": ["-E", "nodiscard"], "mkfs.xfs": ["-K"], "mkfs.btrfs": ["-K"]}[make[0]] if filled else []
        tools.run(*make, *keep, device)
        tools.run("mount", "-o", options, device, directory)
        yield FileSystem(kind, directory, Path(device))
    finally:
        _clean(image, directory)
        signal.signal(signal.SIGTERM, before)
