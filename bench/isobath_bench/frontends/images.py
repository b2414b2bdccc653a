"""What is served: the same bytes as a chain, as one layer and raw; and disks that are written."""

from .. import tools
from ..depth import chains


def size():
    """Bytes of the disk that is read: it must fit the page cache, as a chain and raw."""
    return 256 << 20 if tools.QUICK else 1 << 30


def chain(layers):
    """The active layer of a chain all of whose clusters hold data."""
    return chains.make(layers, size=size(), fill="100%")


def raw():
    """The bytes of the chain of one layer, raw."""
    path = tools.WORK / f"frontends-{size() >> 20}M.raw"
    if not path.exists():
        beside = path.with_suffix(".part")
        tools.run("qemu-img", "convert", "-O", "raw", chain(1), beside)
        beside.rename(path)
    return path


def warm(*paths):
    """Reads files, or all files of a chain, into the page cache."""
    for path in paths:
        if path.suffix == ".qcow2":
            chains.warm(path)
        else:
            tools.run("dd", f"if={path}", "of=/dev/null", "bs=1M")


def filled(form):
    """A disk with data in every cluster, to be written over; in the page cache."""
    path = tools.WORK / f"frontends-filled-{size() >> 20}M.{form}"
    if not path.exists():
        source = chain(1) if form == "qcow2" else raw()
        tools.run("cp", "--sparse=never", source, path)
    # What was written before is not this one's to write back.
    tools.run("sync", path)
    tools.run("dd", f"if={path}", "of=/dev/null", "bs=1M")
    return path


def empty(form, length):
    """A new disk without any data."""
    path = tools.WORK / f"frontends-empty.{form}"
    path.unlink(missing_ok=True)
    if form == "qcow2":
        tools.run("qemu-img", "create", "-q", "-f", "qcow2", path, length)
    else:
        tools.run("truncate", f"--size={length}", path)
    return path
