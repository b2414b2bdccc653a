"""Who is measured: isobath's ways of writing metadata, QEMU's configurations, and raw files."""

import subprocess
from functools import cache

from .. import servers, tools

# Of `isobath serve --metadata`; those that it does not have are left out, and said so.
MODES = ["ordered", "journal", "auto"]
# The one that is to reach the goals.
GOAL = "journal"
# What `qemu-img create` is told, by the name in the tables.
CONFIGURATIONS = {
    "default": "",
    "lazy_refcounts": "lazy_refcounts=on",
    "preallocation=metadata": "preallocation=metadata",
    "preallocation=falloc": "preallocation=falloc",
    "preallocation=full": "preallocation=full",
}
# What QEMU 10 is measured in.
FEW = ["default", "lazy_refcounts"]
THIN, FULL, OVERLAY = "thin", "full", "overlay"


def size():
    """Bytes in the disk."""
    return 64 << 20 if tools.QUICK else 256 << 20


@cache
def modes():
    """The ways of writing metadata that this isobath has."""

    def has(mode):
        said = subprocess.run(
            [tools.ISOBATH, "serve", "--metadata", mode, "/nonexistent"], capture_output=True, text=True
        )
        return "unknown mode" not in said.stderr

    return [mode for mode in MODES if has(mode)]


def missing_note():
    return [f"Without `--metadata {mode}`: this isobath has no such mode." for mode in MODES if mode not in modes()]


class Contender:
    """A server in one configuration, and the images it is measured on."""

    def __init__(self, name, serve, options="", thin=True):
        self.name = name
        self.serve = serve
        self.options = options
        # Whether it allocates clusters when they are first written.
        self.thin = thin

    def has(self, kind):
        """Whether an image of the kind makes a difference to it."""
        return kind == THIN or not self.options.startswith("preallocation")

    def image(self, directory, kind="", disk=None):
        """A new image of a kind in a directory; or one of the bytes of `disk`, zeroes unallocated."""
        path = directory / "disk.qcow2"
        path.unlink(missing_ok=True)
        options = ["-o", self.options] if self.options else []
        if disk:
            tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, disk, path)
            return path
        if kind == FULL:
            full = directory / "full.qcow2"
            if not full.exists():
                tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", written(directory / "disk.raw"), full)
            tools.run("cp", "--reflink=never", full, path)
            if self.options:
                tools.run("qemu-img", "amend", "-o", self.options, path)
            return path
        base = ["-b", base_of(directory), "-F", "qcow2"] if kind == OVERLAY else []
        tools.run("qemu-img", "create", "-q", "-f", "qcow2", *base, *options, path, size())
        return path


class Raw(Contender):
    """A raw file, all of it written."""

    def __init__(self, name, serve):
        super().__init__(name, serve, thin=False)

    def image(self, directory, kind="", disk=None):
        """A raw file without holes: of the bytes of `disk` if there is one."""
        del kind
        path = directory / f"{self.name.replace(' ', '-')}.raw"
        if disk:
            tools.run("cp", "--sparse=never", "--reflink=never", disk, path)
            return path
        return written(path)


def written(path):
    """A raw file without holes."""
    if not path.exists():
        with open(path, "wb") as file:
            for number in range(size() >> 20):
                file.write(bytes([number % 255 + 1]) * (1 << 20))
    return path


def base_of(directory):
    """An image that has all its clusters, to lie under overlays."""
    path = directory / "base.qcow2"
    if not path.exists():
        tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", written(directory / "disk.raw"), path)
    return path


RAW, RAW_QEMU = "raw by isobath", "raw by QEMU"


def isobath(mode):
    return lambda image: servers.isobath(image, "--metadata", mode, log="info")


def reference():
    """The raw file that others are measured beside, by isobath."""
    return Raw("reference", lambda image: servers.isobath(image, "--format=raw", socket="reference"))


def qemu(program, form="qcow2"):
    return lambda image: servers.qemu_nbd(image, program=program, form=form)


@cache
def everybody(few=False):
    """All contenders, by name; `few` leaves out what is rarely asked for."""
    found = [Contender(f"isobath {mode}", isobath(mode)) for mode in modes()]
    for number, (name, directory) in enumerate(servers.qemus().items()):
        for what, options in CONFIGURATIONS.items():
            if what in FEW or (number == 0 and not few):
                thin = not options.startswith("preallocation")
                found.append(Contender(f"{name} {what}", qemu(f"{directory}qemu-nbd"), options, thin))
    found.append(Raw(RAW, lambda image: servers.isobath(image, "--format=raw", log="info")))
    found.append(Raw(RAW_QEMU, qemu("qemu-nbd", "raw")))
    return {contender.name: contender for contender in found}


def best_qemu(figures):
    """The best of QEMU's figures on images that do not have all their blocks written, by name."""
    thin = {name: value for name, value in figures.items() if name.startswith("QEMU") and "full" not in name}
    thin = {name: value for name, value in thin.items() if value is not None}
    return max(thin.items(), key=lambda item: item[1], default=(None, None))
