"""File systems on loop devices: made for a measurement, and gone after it, however it ends."""

import contextlib
import os
import shutil
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
PACKAGES = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
BYTES = 3 << 30


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
    """Takes away what is mounted, by this run or one before."""
    if os.path.ismount(directory):
        tools.run("umount", directory)
    for line in tools.run("losetup", "--associated", image).splitlines() if image.exists() else ():
        tools.run("losetup", "--detach", line.split(":")[0])


@contextlib.contextmanager
def attached(image, *, make=(), options="noatime", direct=False):
    """A loop device on a file, and a directory where it is mounted; `make` makes a file system first."""
    directory = image.with_name(f"{image.name}.mount")
    directory.mkdir(parents=True, exist_ok=True)
    # A signal that ends the run unwinds as an interrupt from the keyboard does.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: ended by a signal"))
    _clean(image, directory)
    try:
        device = tools.run("losetup", "--find", "--show", *(["--direct-io=on"] if direct else []), image).strip()
        if make:
            tools.run(*make, device)
        tools.run("mount", "-o", options, device, directory)
        yield Path(device), directory
    finally:
        _clean(image, directory)
        directory.rmdir()
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def mounted(kind, filled=False):
    """A new, empty file system of a kind. `filled` is for measuring times: its backing file has all its
    blocks written and is used without the page cache, so that the file system below has little part in them."""
    make, options = KINDS[kind]
    if not shutil.which(make[0]):
        raise tools.Failed(f"{make[0]} is missing: apt-get install {PACKAGES[make[0]]}")
    image = tools.WORK / f"flush-{kind.replace(' ', '-')}.img"
    try:
        if filled:
            tools.run("dd", "if=/dev/zero", f"of={image}", "bs=4M", f"count={BYTES >> 22}", "conv=fsync,notrunc")
            # Discards of a new file system would make holes.
            make = [*make, *{"mkfs.ext4": ["-E", "nodiscard"]}.get(make[0], ["-K"])]
        else:
            image.unlink(missing_ok=True)
            tools.run("truncate", f"--size={BYTES}", image)
        with attached(image, make=make, options=options, direct=filled) as (device, directory):
            yield FileSystem(kind, directory, device)
    finally:
        image.unlink(missing_ok=True)
