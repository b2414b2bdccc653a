"""Chains as QEMU opens them, layer by layer, each with a cache of its own size."""

import struct
from pathlib import Path

MAGIC = b"QFI\xfb"
FORMATS = {MAGIC: "qcow2", b"KDMV": "vmdk"}


def layers(active):
    """The files of a chain, from the active layer down."""
    found, path = [], Path(active)
    while path:
        found.append(path)
        with open(path, "rb") as file:
            header = file.read(20)
            # Specification: backing file offset and size at bytes 8 and 16.
            offset, length = struct.unpack(">QI", header[8:20]) if header[:4] == MAGIC else (0, 0)
            file.seek(offset)
            name = file.read(length).decode() if offset else ""
        path = path.parent / name if name else None
    return found


def qemu_blockdevs(active, l2_cache=None, *, direct=False, writable=True, node="disk"):
    """`--blockdev` options for an image, the node on top called `node`. With `l2_cache` (bytes) every layer of its
    chain has an L2 cache of that size, of which QEMU makes entries of 4 KiB, two at least, or of a cluster where all of
    the layer's tables fit; without, QEMU chooses. Files beside the active layer are named as layers name them, for a
    process in that directory: where QEMU sees other names, opening takes time by the cube of the layers."""
    cache = f"cache.direct={'on' if direct else 'off'}"
    top = f"read-only={'off' if writable else 'on'}"
    files = layers(active) if l2_cache else [Path(active)]
    options = []
    for number, path in reversed(list(enumerate(files))):
        how = f"{cache},{top}" if number == 0 else f"{cache},read-only=on"
        form = FORMATS.get(path.open("rb").read(4), "raw")
        name = path.relative_to(files[0].parent) if path.is_relative_to(files[0].parent) else path
        options += [
            "--blockdev",
            f"driver=file,node-name={node}-{number}-file,filename={name},aio=io_uring,{how},discard=unmap",
        ]
        more = ",discard=unmap"
        if l2_cache and form == "qcow2":
            more += f",l2-cache-size={l2_cache}"
            more += f",backing={node}-{number + 1}" if number + 1 < len(files) else ""
        name = node if number == 0 else f"{node}-{number}"
        options += ["--blockdev", f"driver={form},node-name={name},file={node}-{number}-file,{how}{more}"]
    return options
