"""A build of the Linux kernel on a new file system: mkfs, a copy of the source, the build."""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Baseline, compared
from . import common
from .common import EMBEDDED, JOURNAL, QEMU, RAW

NAME = "kernel_build"
TITLE = "Kernel build"
SOURCE = "Selfie, table 1"

SOURCES = Path("/usr/src/linux-source-6.1.tar.xz")
# Of the sources, what configuring and building a part of it takes.
WHOLE = [
    "arch/x86",
    "include",
    "scripts",
    "lib",
    "kernel",
    "mm",
    "security",
    *(f"tools/{name}" for name in ("arch", "build", "include", "lib", "objtool", "scripts")),
]
ALWAYS = ["Kconfig*", "Makefile*", "Kbuild*"]
HEADERS = ["fs", "net", "block", "crypto"]
# Of a quick run.
MAKEFILE = """
.PHONY: tinyconfig prepare lib/
tinyconfig prepare:
lib/: $(patsubst %.c,%.o,$(wildcard *.c))
"""
DISK = 64 << 30
PHASES = ["mkfs", "copy", "make"]
# Seconds of table 1.
PAPER = {EMBEDDED: (4.062, 4.682, 1324.452), QEMU: (31.584, 12.935, 1890.410), RAW: (3.961, 0.831, 1241.463)}
WHO = [EMBEDDED, JOURNAL, QEMU, RAW]


def points(profile):
    return [Point((contender,), seconds=profile.of(1.5, 30)) for contender in WHO]


class Setting:
    """The files that are copied; what is built is unpacked from the last."""

    def __init__(self, place, files):
        self.place = place
        self.files = files


def unpack_part(directory):
    """The part of the kernel's sources that is built."""
    if not SOURCES.exists():
        raise tools.Failed(f"{SOURCES} is missing: apt-get install linux-source-6.1")
    root = SOURCES.name.removesuffix(".tar.xz")
    wanted = [
        *(f"{root}/{name}/*" for name in WHOLE),
        *(f"{root}*/{name}" for name in ALWAYS),
        *(f"{root}/{name}/*.h" for name in HEADERS),
    ]
    tools.run(
        "tar",
        "--extract",
        f"--file={SOURCES}",
        f"--directory={directory}",
        "--strip-components=1",
        "--wildcards",
        *wanted,
    )


def write_stand_in(directory):
    """A few files to be built."""
    (directory / "Makefile").write_text(MAKEFILE)
    for number in range(10):
        (directory / f"{number}.c").write_text(f"int value{number}(void) {{ return {number}; }}\n")


def packed(name, fill):
    """A tarball of what is put into a directory; made once, and used again."""
    part = tools.WORK / f"{name}.tar.gz"
    if not part.exists():
        directory, fresh = tools.WORK / name, part.with_suffix(".new")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            fill(directory)
            tools.run("tar", "--create", "--gzip", f"--file={fresh}", f"--directory={directory}", ".")
        finally:
            shutil.rmtree(directory)
        fresh.rename(part)
    return part


@contextlib.contextmanager
def setting(profile):
    part = packed("selfie-quick", write_stand_in) if profile.quick else packed("selfie-kernel", unpack_part)
    with common.place("hdd") as place:
        yield Setting(place, [part] if profile.quick else [SOURCES, part])


def make(directory, part):
    """Unpacks, configures and builds."""
    for command in (["tar", "xf", part.name], ["make", "-s", "tinyconfig"], ["make", "-s", "-j8", "prepare", "lib/"]):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if done.returncode != 0:
            raise tools.Failed(f"{' '.join(command)} failed: {done.stderr[-1000:]}")


def measure(setting, point, number):
    """Fields: seconds of each phase, the last two with a sync; what the disk was sent in all of them; the server's
    `cpu` in seconds."""
    del number
    found = {}

    @contextlib.contextmanager
    def timed(phase):
        began = time.perf_counter()
        yield
        found[phase] = time.perf_counter() - began

    with common.attached(*point.key, setting.place, DISK) as (disk, device):
        with timed("mkfs"):
            tools.run("mkfs.ext4", "-q", "-F", device)
        with common.mounted(device) as directory:
            with timed("copy"):
                for file in setting.files:
                    shutil.copy(file, directory)
                common.synced(directory)
            with timed("make"):
                make(directory, setting.files[-1])
                common.synced(directory)
            found |= {"cpu": disk.server.cpu(), **disk.sent()}
    return found


def section(results):
    seconds = {contender: {phase: results.median((contender,), phase) for phase in PHASES} for contender in WHO}
    rows = []
    for contender in WHO:
        cells = []
        for number, phase in enumerate(PHASES):
            cells += [results.text((contender,), phase, "{:.2f}"), results.spread_text((contender,), phase)]
            cells.append(f"{PAPER[contender][number]:,.3f}" if contender in PAPER else "-")
        rows.append(
            [contender, *cells, *common.sent_texts(results, (contender,)), results.text((contender,), "cpu", "{:.1f}")]
        )
    columns = [
        "server",
        *(text for phase in PHASES for text in (f"{phase}, s", "spread", "paper, s")),
        "disk's writes",
        "flushes",
        "MB",
        "server's CPU, s",
    ]

    def name(phase, one):
        return f"{phase}: {one}'s time ÷ embedded's"

    def verdict(phase, one, better="higher", why=""):
        number = PHASES.index(phase)
        paper = PAPER[one][number] / PAPER[EMBEDDED][number]
        baseline = None
        if one == QEMU:
            baseline = Baseline(
                f"{phase}, QEMU's time ÷ the raw disk's",
                PAPER[QEMU][number] / PAPER[RAW][number],
                results.ratio((QEMU,), (RAW,), phase),
                name(phase, RAW),
            )
        return compared(results, name(phase, one), paper, (one,), (EMBEDDED,), phase, better, why, baseline=baseline)

    groups = {phase: {contender: seconds[contender][phase] for contender in WHO} for phase in PHASES}
    paper = {
        phase: {contender: times[number] for contender, times in PAPER.items()} for number, phase in enumerate(PHASES)
    }
    return Section(
        paper=(
            "mkfs.ext4, a copy of the kernel's packed source (77 MB) onto it, and makepkg, which unpacks, builds and"
            " packs it in about 20 minutes. Selfie takes 4.1, 4.7 and 1,324 s, QCOW2 31.6, 12.9 and 1,890 s, the bare"
            " disk 4.0, 0.8 and 1,241 s."
        ),
        ours=(
            f"mkfs.ext4 with its defaults on a disk of {DISK >> 30} GiB; a copy of Debian's packed source of Linux 6.1"
            " (138 MB) and of a packed part of it (25 MB), synced; then this part is unpacked (15,000 files),"
            " configured (tinyconfig), and `make -j8 prepare lib/` is run, synced: about 40 s of CPU instead of the"
            " paper's 20 minutes. The image is on the hard disk, and seen by a loop device on the served disk (by"
            f" nbdfuse, the same for all). {common.ON_VOLUMES}"
        ),
        parts=[
            figures.bars(results, "table1", "Kernel build", "s", groups, log=True, paper=paper),
            Table("Kernel build", columns, rows, "The disk's requests and the CPU are of all phases."),
        ],
        verdicts=[
            verdict("mkfs", QEMU),
            verdict(
                "copy",
                QEMU,
                why=(
                    "QEMU 7.2 does not sync within a request: it is bound by the disk's bandwidth, and so is the raw"
                    f" disk, with {results.text((RAW,), 'copy', '{:.2f}')} s"
                ),
            ),
            verdict(
                "make",
                QEMU,
                why=(
                    f"the compiler takes most of it: on the raw disk it is {results.text((RAW,), 'make', '{:.1f}')} s,"
                    f" and the server uses {results.text((EMBEDDED,), 'cpu', '{:.1f}')} s of CPU"
                ),
            ),
            verdict("mkfs", RAW),
            verdict("copy", RAW),
            verdict("make", RAW, why="measured on two cores that server, compiler and simulated disk share"),
        ],
    )
