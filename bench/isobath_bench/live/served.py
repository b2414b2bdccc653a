"""A disk in use: an NBD server with a control socket."""

import contextlib
from functools import cache

from .. import servers, tools
from .control import Qmp

ISOBATH = "isobath"
# The disk's name over NBD and over QMP.
DISK = "disk"


@contextlib.contextmanager
def isobath(image, *options):
    """`isobath serve` with its control socket: the server, and QMP."""
    control = tools.WORK / "live-isobath.qmp"
    options = ["--export-name", DISK, "--qmp", f"unix:{control}", *options]
    with servers.isobath(image, *options) as server, Qmp(control) as qmp:
        yield server, qmp


@contextlib.contextmanager
def qemu(image, program="qemu-storage-daemon", name="QEMU"):
    """`qemu-storage-daemon`, configured as `qemu-nbd` is elsewhere: io_uring, the page cache, L2 caches
    as large as they come."""
    control, socket = tools.WORK / "live-qemu.qmp", tools.WORK / "live-qemu.sock"
    control.unlink(missing_ok=True)
    command = [
        program,
        "--blockdev",
        f"driver=qcow2,node-name={DISK},discard=unmap,file.driver=file,file.filename={image},file.aio=io_uring",
        "--nbd-server",
        f"addr.type=unix,addr.path={socket}",
        "--export",
        f"type=nbd,id=export,node-name={DISK},name={DISK},writable=on",
        "--chardev",
        f"socket,id=control,path={control},server=on,wait=off",
        "--monitor",
        "chardev=control",
    ]
    with servers.Server(name, command, socket, export=DISK, patience=180) as server, Qmp(control) as qmp:
        yield server, qmp
    control.unlink(missing_ok=True)


def serve(name, image, *options):
    """Serves an image by isobath or one of the QEMUs, by its name in the tables."""
    if name == ISOBATH:
        return isobath(image, *options)
    return qemu(image, servers.qemus()[name] + "qemu-storage-daemon", name)


@cache
def names():
    """All that are measured side by side."""
    return [ISOBATH, *servers.qemus()]
