"""Who is compared, on which disks, and how images are served there.

A *volume* is a simulated disk that holds the image and nothing else, as the paper's logical volumes do: isobath is on
it itself, QEMU has its image in a raw export of that disk, over NBD. Elsewhere the image is a file on a file system on
such a disk (`stage.slow`).
"""

import contextlib

from isobath_bench import servers, tools
from isobath_bench.embedded import contenders, places

from ..stage import disks, slow

EMBEDDED, JOURNAL, QEMU, RAW = "isobath embedded", "isobath journal", "QEMU", "raw"
MAKE = {"ext4": disks.MAKE, "btrfs": ["mkfs.btrfs", "-q", "-f"]}
PEERS = (
    "*isobath embedded* is the paper's idea: `--metadata embedded`; *isobath journal* is the other mode that makes one"
    " sync of a flush. FVD was never part of QEMU, and QED is no format for new images: neither is measured. *raw* is a"
    " raw file served by isobath, in place of the paper's HOST, the bare disk."
)
SIMULATED = f"*hdd* ({slow.ABOUT['hdd']}) and *ssd* ({slow.ABOUT['ssd']}) are simulated, the same for all."
ON_VOLUMES = (
    f"{SIMULATED} For the paper's logical volume the image has such a disk to itself, as isobath's `--slow-disk`; QEMU"
    " reaches it over NBD."
)


class Place(places.Place):
    """Where images lie: a volume, or a directory on a device that counts."""

    def __init__(self, name, directory, slow=None, device=None):
        super().__init__(name, directory, slow)
        self.device = device

    def cache(self):
        """A volume's costs are in the server; those of a device must not be hidden by the page cache."""
        return "writeback" if self.slow else "none"


@contextlib.contextmanager
def place(name, size=16 << 30):
    """A volume (`hdd`), or a file system on a simulated disk (`hdd ext4`) of some bytes."""
    kind, _, system = name.partition(" ")
    if not system:
        with places.place(kind) as volume:
            yield Place(name, volume.directory, volume.slow)
    else:
        with slow.device(kind, size, MAKE[system]) as device:
            yield Place(name, device.directory, device=device)


def make(contender, where, size):
    """A new image of a disk of some bytes; returns its path."""
    path = where.directory / "disk"
    path.unlink(missing_ok=True)
    if contender == RAW:
        tools.run("truncate", f"--size={size}", path)
    else:
        contenders.make_qcow2(path, size, None)
        if contender == QEMU and where.slow:
            # The export is as long as the image may become.
            tools.run("truncate", f"--size={size * 2 + (64 << 20)}", path)
    where.settle()
    return path


def command(contender, image, where, socket):
    """The server's command; `image` is a path, or for QEMU on a volume the URI of the export that holds it."""
    if contender == QEMU:
        return [
            "qemu-nbd",
            "--persistent",
            "--shared=128",
            "--format=qcow2",
            "--aio=io_uring",
            "--discard=unmap",
            f"--cache={where.cache()}",
            f"--socket={socket}",
            image,
        ]
    how = ["--format=raw"] if contender == RAW else ["--metadata", contender.removeprefix("isobath ")]
    return [tools.ISOBATH, "serve", image, "--nbd", f"unix:{socket}", "--cache", where.cache(), *where.options(), *how]


class Places:
    """Places, made when they are first used; `stack` ends them."""

    def __init__(self, stack):
        self._stack = stack
        self._places = {}

    def place(self, name):
        if name not in self._places:
            self._places[name] = self._stack.enter_context(place(name))
        return self._places[name]


class Served:
    """A disk in use: its NBD server, and the one that is the simulated disk."""

    def __init__(self, server, counter, device):
        self.server = server
        self._counter = counter
        self._device = device

    def sent(self):
        """What the simulated disk was sent so far (a volume: until its last flush): reads, writes, bytes_written,
        flushes."""
        if not self._device:
            found = contenders.requests(self._counter)
            return {name: found[name] for name in ("reads", "writes", "bytes_written", "flushes")}
        found = self._device.requests()
        return {
            "reads": found["reads"],
            "writes": found["writes"],
            "bytes_written": found["sectors"] * 512,
            "flushes": found["flushes"],
        }


@contextlib.contextmanager
def served(contender, image, where, kind=servers.Server, patience=60):
    """Serves an image over NBD; with `disks.Disk` for `kind` it is also a file."""
    environment = {"ISOBATH_LOG": contenders.COUNTING}
    socket = tools.WORK / "selfie.sock"
    with contextlib.ExitStack() as stack:
        device = None
        if contender == QEMU and where.slow:
            device = stack.enter_context(
                servers.isobath(
                    image, "--format=raw", *where.options(), log=contenders.COUNTING, socket="selfie-device"
                )
            )
            image = device.uri
        server = stack.enter_context(
            kind(
                contender, command(contender, image, where, socket), socket, patience=patience, environment=environment
            )
        )
        yield Served(server, device or server, where.device)


@contextlib.contextmanager
def fresh(contender, where, size, kind=servers.Server):
    """Serves a new image, which is gone afterwards."""
    image = make(contender, where, size)
    try:
        with served(contender, image, where, kind) as disk:
            try:
                yield disk
            finally:
                # A clean end would take time, for an image that nobody needs.
                disk.server.process.kill()
    finally:
        image.unlink()


@contextlib.contextmanager
def attached(contender, where, size):
    """A new image as a loop device without a file system: the served disk, and the device."""
    with fresh(contender, where, size, disks.Disk) as disk, disks.looped(disk.server) as device:
        yield disk, device


@contextlib.contextmanager
def mounted(device):
    """A directory where a loop device's file system is mounted."""
    directory = tools.WORK / "selfie.mount"
    directory.mkdir(parents=True, exist_ok=True)
    tools.run("mount", "-o", "noatime", device, directory)
    try:
        yield directory
    finally:
        tools.run("umount", directory)
        directory.rmdir()


def synced(directory):
    """Has a file system written back."""
    tools.run("sync", "--file-system", directory)


def sent_texts(results, key):
    """For a table what the disk was sent: writes, flushes, MB."""
    return [
        results.text(key, "writes"), results.text(key, "flushes"), results.text(key, "bytes_written", "{:,.0f}", 1e-6),
    ]  # fmt: skip


def difference(later, earlier, count=1):
    """What was sent between two times, for each of so many requests."""
    return {f"{name}_each" if count != 1 else name: (later[name] - earlier[name]) / count for name in later}
