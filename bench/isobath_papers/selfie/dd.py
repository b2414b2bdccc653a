"""dd in a guest's file system: a file written, synced, read again, by how much of it compresses."""

import contextlib
import random
import time

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import disks
from ..verdict import Baseline, Cause, Verdict, compared
from . import common
from .common import EMBEDDED, JOURNAL, QEMU, RAW

NAME = "dd"
TITLE = "dd"
SOURCE = "Selfie, figure 8"

BLOCK = 4096
# Parts of the blocks that do not compress, in percent.
PARTS = (0, 50, 100)
DISK = 16 << 30
# Section 3.2: Selfie's time with nothing incompressible is 77 % below QCOW2's; 50 and 100 % add 75 and 153 % to it.
SELFIE = {0: 0.23, 50: 0.23 * 1.75, 100: 0.23 * 2.53}


def points(profile):
    def point(contender, part):
        return Point((contender, part), seconds=profile.of(1, 10 if (contender, part) == (EMBEDDED, 0) else 7))

    return [point(EMBEDDED, part) for part in PARTS] + [
        point(JOURNAL, 0),
        point(QEMU, 0),
        point(QEMU, 100),
        point(RAW, 0),
    ]


def make(path, size, part):
    """A file of so many bytes, of whose blocks some percent do not compress; the others do to about a half."""
    choice = random.Random(part)
    with open(path, "wb") as file:
        for _ in range(size // BLOCK):
            if choice.randrange(100) < part:
                file.write(choice.randbytes(BLOCK))
            else:
                file.write(b"".join(choice.randbytes(256) + bytes(256) for _ in range(BLOCK // 512)))


class Setting:
    def __init__(self, place, sources, size):
        self.place = place
        self.sources = sources
        self.size = size


@contextlib.contextmanager
def setting(profile):
    size = profile.of(8, 256) << 20
    with tools.in_memory("papers-dd") as directory:
        sources = {part: directory / f"{part}" for part in PARTS}
        for part, path in sources.items():
            make(path, size, part)
        with common.place("hdd") as place:
            yield Setting(place, sources, size)


def copy(source, directory, *options):
    """Seconds to write a file and have it synced."""
    began = time.perf_counter()
    tools.run("dd", f"if={source}", f"of={directory / 'file'}", "bs=1M", *options)
    common.synced(directory)
    return time.perf_counter() - began


def measure(setting, point, number):
    """Fields in seconds: `write`, with a sync; `read` of what was written; `overwrite` of compressible by
    incompressible data; `cpu` of the server for " "the write."""
    del number
    contender, part = point.key
    with common.attached(contender, setting.place, DISK) as (disk, device):
        tools.run(*disks.MAKE, device)
        with common.mounted(device) as directory:
            before, cpu = disk.sent(), disk.server.cpu()
            found = {"write": copy(setting.sources[part], directory)}
            found |= {"cpu": disk.server.cpu() - cpu, **common.difference(disk.sent(), before)}
            # Takes the file out of the page cache.
            tools.run("dd", f"if={directory / 'file'}", "of=/dev/null", "iflag=nocache", "count=0")
            found["read"] = tools.timed("dd", f"if={directory / 'file'}", "of=/dev/null", "bs=1M")
            if (contender, part) == (EMBEDDED, 0):
                found["overwrite"] = copy(setting.sources[100], directory, "conv=notrunc")
    return found | {"bytes": setting.size}


def section(results):
    def ratio(what, paper, one, other, field="write", better="higher", why="", **more):
        return compared(results, what, paper, one, other, field, better, why, **more)

    def written(what, part, one):
        """QEMU's time ÷ embedded's; and the raw disk's, which does not look at what is written."""
        paper, by_itself = 1 / SELFIE[part], f"write, {what}: raw's time ÷ embedded's (the paper: no number, at most 1)"
        baseline = Baseline(
            f"write, {what}, QEMU's time ÷ the raw disk's",
            paper,
            results.ratio(one, (RAW, 0), "write"),
            by_itself,
            at_least=True,
        )
        ours = (EMBEDDED, part)
        return [
            ratio(f"write, {what}: QEMU's time ÷ embedded's", paper, one, ours, why=bound, baseline=baseline),
            ratio(by_itself, 1.0, (RAW, 0), ours),
        ]

    def rate(key, field):
        size, seconds = results.median(key, "bytes"), results.median(key, field)
        return "-" if not seconds else f"{size / seconds / 1e6:,.0f}"

    keys = [point.key for point in points(results.profile)]
    shown = {key: f"{EMBEDDED}, {key[1]} %" if key[0] == EMBEDDED else key[0] for key in keys if key != (QEMU, 100)}
    bars = {
        what: {label: results.median(key, field) for key, label in shown.items()}
        for what, field in (("write and sync", "write"), ("read", "read"))
    }  # fmt: skip
    rows = []
    for key in keys:
        rows.append(
            [
                key[0],
                f"{key[1]} %",
                results.text(key, "write", "{:.2f}"),
                results.spread_text(key, "write"),
                rate(key, "write"),
                results.text(key, "read", "{:.2f}"),
                rate(key, "read"),
                results.text(key, "overwrite", "{:.2f}"),
                results.text(key, "cpu", "{:.2f}"),
                *common.sent_texts(results, key),
            ]
        )
    size = results.median(keys[0], "bytes") or 0
    columns = [
        "server",
        "incompressible",
        "write, s",
        "spread",
        "MB/s",
        "read, s",
        "MB/s",
        "overwrite, s",
        "server's CPU, s",
        "disk's writes",
        "flushes",
        "MB",
    ]
    table = Table(
        "dd",
        columns,
        rows,
        "*Overwrite*: the compressible file by incompressible data. The disk's requests and the CPU are of the write.",
    )
    raw, taken = (results.text((one, 0), "write", "{:.2f}") for one in (RAW, QEMU))
    flushes = results.text((QEMU, 0), "flushes")
    bound = (
        f"QEMU 7.2 writes tables once for many clusters and does not sync within a request ({flushes} flushes in all):"
        f" it takes {taken} s, and the raw disk {raw} s, below which nobody comes"
    )
    cpu = (
        f"the server's CPU time for all of the write is {results.text((EMBEDDED, 0), 'cpu', '{:.2f}')} s, so it is not"
        " the compression that takes the rest"
    )
    verdicts = [
        *written("all compressible", 0, (QEMU, 0)),
        *written("half incompressible", 50, (QEMU, 0)),
        *written("all incompressible", 100, (QEMU, 100)),
        ratio(
            "write, half ÷ nothing incompressible: embedded's times",
            1.75,
            (EMBEDDED, 50),
            (EMBEDDED, 0),
            better="lower",
        ),
        ratio(
            "write, all ÷ nothing incompressible: embedded's times",
            2.53,
            (EMBEDDED, 100),
            (EMBEDDED, 0),
            better="lower",
        ),
        ratio("read: QEMU's time ÷ embedded's", 1.0, (QEMU, 0), (EMBEDDED, 0), field="read"),
        ratio(
            "write with ÷ without compression: embedded's time ÷ journal's",
            1.0,
            (EMBEDDED, 0),
            (JOURNAL, 0),
            better="lower",
            why=cpu,
        ),
    ]
    overwrite, whole = results.median((EMBEDDED, 0), "overwrite"), results.median((EMBEDDED, 100), "write")
    verdicts.append(
        Verdict(
            "overwriting compressible by incompressible data ÷ writing it anew, embedded",
            1.0,
            overwrite and whole and overwrite / whole,
            better="lower",
            cause=Cause.OURS,
            points=((EMBEDDED, 0), (EMBEDDED, 100)),
            why=(
                "a lead block that no longer compresses goes into the journal as data, and to its place after that:"
                " each cluster is then written in two places"
            ),
        )
    )
    return Section(
        paper=(
            "dd in the guest reads a file of 8 GB and writes it back, with one sync at the end. Selfie's writing takes"
            " 77 % less time than QCOW2's where all blocks compress (66 % less than FVD's); 75 and 153 % more than that"
            " where half or all of the blocks do not, which is still less than QCOW2. Reading does not differ, and"
            " compressing costs no time that could be measured. Incompressible data over compressible take as long as"
            " in a new file."
        ),
        ours=(
            "dd in ext4 on a loop device on the served disk (by nbdfuse, the same for all), a file of"
            f" {size / 2**20:,.0f} MiB from memory, blocks of 4 KiB that compress to a half or not at all, the image on"
            f" the hard disk. The file is read after it was written, with an empty page cache. {common.ON_VOLUMES}"
        ),
        parts=[figures.bars(results, "fig8", "dd: a file written and synced, and read", "s", bars), table],
        verdicts=verdicts,
    )
