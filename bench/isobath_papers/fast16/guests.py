"""Guests: a disk with an application's files below an overlay on a slow disk, and the application at work on it.

A guest is an ext4 on a loop device on the file that shows the disk, alike for every server.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from isobath_bench import tools
from isobath_bench.flush import mounts

from ..stage import disks, slow

HERE = Path(__file__).parent
OURS, THEIRS, RAW, RAW_QEMU = "isobath", "QEMU", "raw", "raw by QEMU"
# The slow disks, and what the paper's figures call them.
DISKS = {"hdd": "HDD", "ssd": "SSD"}
DISKS_TEXT = f"`hdd` ({slow.ABOUT['hdd']}) and `ssd` ({slow.ABOUT['ssd']})"
STAGE_BYTES = 4 << 30
GUEST_BYTES = 256 << 20
# A file system with the blocks of a large disk, although its own is small, and large files aligned to clusters. It
# zeroes nothing beforehand, which would take the blocks of a disk that has them written.
MAKE = [
    "mkfs.ext4",
    "-q",
    "-F",
    "-b",
    "4096",
    "-E",
    "stride=16,stripe_width=16,lazy_itable_init=1,lazy_journal_init=1,nodiscard",
]
# Files and threads of filebench's personalities, scaled: it has 1,000 and 16, 10,000 and 50, 1,000 and 100.
PERSONALITIES = {"varmail": (1000, 16), "fileserver": (400, 2), "webserver": (1000, 2)}
MAIL, TPCC = "varmail", "TPC-C"
SPEED = {TPCC: "tpmc"} | dict.fromkeys(PERSONALITIES, "operations_per_second")
# What fio does all the time on the disk of a neighbour, whose image is opened without the page cache.
NEIGHBOURS = {"seq": ["--rw=readwrite", "--bs=64k"], "ran": ["--rw=randrw", "--bs=4k"]}
NEIGHBOURS_TEXT = (
    "reads and writes mixed evenly, one at a time, of 64 KiB in order (*seq*) or of 4 KiB anywhere (*ran*), past the"
    " host's page cache"
)


def measured(results):
    """The disks of which there are results; the disk is the first part of a key."""
    return [disk for disk in DISKS if any(key[0] == disk for key in results.keys())]


class Stages(dict):
    """Slow disks with file systems, by name; the bases that images on them lie over."""

    def base(self, disk, application):
        return self[disk].directory / f"base-{application}.qcow2"

    def neighbour(self, disk):
        return self[disk].directory / "neighbour.qcow2"


@contextlib.contextmanager
def stages(kinds, applications=(), neighbour=0):
    """Slow disks with bases of some applications, and the image of a neighbour of so many bytes, all its clusters
    written."""
    with contextlib.ExitStack() as stack:
        found = Stages({kind: stack.enter_context(slow.device(kind, STAGE_BYTES)) for kind in kinds})
        for kind in kinds:
            for application in applications:
                tools.run("cp", prepared(application).with_suffix(".qcow2"), found.base(kind, application))
            if neighbour:
                tools.run(
                    "qemu-img",
                    "create",
                    "-q",
                    "-f",
                    "qcow2",
                    "-o",
                    "preallocation=full",
                    found.neighbour(kind),
                    neighbour,
                )
            found[kind].settle()
        yield found


def program():
    """The personalities' program, compiled."""
    source, path = HERE / "personalities.c", tools.WORK / "personalities"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        tools.run("cc", "-O2", "-pthread", source, "-o", path)
    return path


def prepare(application, directory):
    """Makes the files of an application; of any other name, one file that fills half of the disk."""
    if application == TPCC:
        tools.run(sys.executable, HERE / "tpcc.py", "prepare", directory / "tpcc.db")
    elif application in PERSONALITIES:
        tools.run(program(), "prepare", directory, application, PERSONALITIES[application][0])
    else:
        with open(directory / "file", "wb") as file:
            for _ in range(GUEST_BYTES // 2 >> 20):
                file.write(os.urandom(1 << 20))


def command(application, directory, seconds, seed):
    """What runs an application for some seconds, and prints what it has done as JSON."""
    if application == TPCC:
        return [sys.executable, HERE / "tpcc.py", "run", directory / "tpcc.db", seconds, seed]
    return [program(), "run", directory, application, *PERSONALITIES[application], seconds, seed + 1]


def prepared(application):
    """The disk of a guest with an application's files, raw, and beside it as qcow2; kept for later runs."""
    raw = tools.WORK / f"fast16-{application}.raw"
    image = raw.with_suffix(".qcow2")
    if not image.exists():
        raw.unlink(missing_ok=True)
        tools.run("truncate", f"--size={GUEST_BYTES}", raw)
        with mounts.attached(raw, make=MAKE, options="noatime,noinit_itable") as (_, directory):
            prepare(application, directory)
        new = raw.with_suffix(".new")
        tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, new)
        new.rename(image)
    return raw


@contextlib.contextmanager
def new_image(stages, disk, name):
    """Where a new image is to be made on a slow disk; gone afterwards."""
    path = stages[disk].directory / f"{name}.img"
    path.unlink(missing_ok=True)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        stages[disk].settle()


@contextlib.contextmanager
def overlay(stages, disk, application, contender, options=""):
    """A new image of a guest on a slow disk: an overlay, or for `raw` a copy with all blocks written."""
    with new_image(stages, disk, application) as path:
        if contender.startswith(RAW):
            tools.run("cp", "--sparse=never", "--reflink=never", prepared(application), path)
        else:
            how = ["-o", options] if options else []
            tools.run(
                "qemu-img",
                "create",
                "-q",
                "-f",
                "qcow2",
                *how,
                "-b",
                stages.base(disk, application),
                "-F",
                "qcow2",
                path,
            )
        stages[disk].settle()
        yield path


def served(contender, image, cache="writeback"):
    """A disk, by a contender's name."""
    return (
        disks.qemu(image, cache=cache, name=contender)
        if contender == RAW_QEMU
        else disks.serve(contender, image, cache=cache)
    )


@contextlib.contextmanager
def guest(contender, image, make=None):
    """A guest on an image: its file system. `make` makes that first."""
    with served(contender, image) as disk, disks.mounted(disk, make=make, options="noatime,noinit_itable") as system:
        system.settle()
        yield system


@contextlib.contextmanager
def at_work(*words):
    """A program in the background; it is interrupted at the end, if it has not ended."""
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def together(systems, seconds, seed):
    """Runs applications at the same time, each on its guest; gives what each has printed."""
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(at_work(*command(name, system.directory, seconds, seed)))
            for name, system in systems.items()
        }
        outputs = {name: process.communicate() for name, process in running.items()}
    for name, process in running.items():
        if process.returncode:
            raise tools.Failed(f"{name} failed with {process.returncode}: {''.join(outputs[name])[-1000:]}")
    return {name: json.loads(out) for name, (out, _) in outputs.items()}


@contextlib.contextmanager
def neighbour(contender, image, how):
    """Somebody at work all the time on another disk of the same server's kind. Gives a function that ends it, and tells
    its bytes a second; without `how` there is nobody."""
    if not how:
        yield dict
        return
    load = [
        "fio",
        "--name=neighbour",
        "--ioengine=nbd",
        "--iodepth=1",
        "--time_based",
        "--runtime=600",
        "--norandommap",
        "--output-format=json",
    ]
    with (
        served(contender, image, cache="none") as disk,
        at_work(*load, f"--uri={disk.uri}", *NEIGHBOURS[how]) as process,
    ):

        def end():
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
            if "{" not in out:
                raise tools.Failed(f"the neighbour's fio: {(out + error)[-500:]}; {disk.state()}")
            [job] = json.loads(out[out.index("{") :])["jobs"]
            return {"neighbour_bytes_per_second": job["read"]["bw_bytes"] + job["write"]["bw_bytes"]}

        yield end
