"""Loss of power below an image: what a guest's disk holds afterwards."""

import subprocess
from collections import Counter
from dataclasses import asdict
from random import Random

from isobath_bench import servers, tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Verdict
from . import nbd, states

NAME = "power_loss"
TITLE = "Power loss below an image"
SOURCE = "Blockbridge, Understanding QCOW2 risks with QEMU cache=none in Proxmox"
DISK, DEVICE = 8 << 20, 20 << 20
CLUSTER = 64 << 10
SEED = 20261128
RAW, THIN, FILLED, INTERNAL, OVERLAY, LAZY, SUBCLUSTERS = LAYOUTS = [
    "raw",
    "qcow2, empty",
    "qcow2, full",
    "internal snapshot",
    "overlay",
    "overlay, lazy_refcounts",
    "overlay, extended_l2, 128 KiB",
]
# Behind a layout: the guest writes whole clusters alone.
WHOLE = "; whole clusters written"
OPTIONS = {LAZY: "lazy_refcounts=on", SUBCLUSTERS: "extended_l2=on,cluster_size=128k"}
ISOBATH = ["isobath ordered", "isobath journal", "isobath embedded"]
IN_FLIGHT = 4
# Behind a system: its device answers flushes, and makes nothing durable. There the method must find what is lost.
# (QEMU's own `cache=unsafe` does not keep flushes from an NBD server.)
CONTROL = ", flushes ignored"
# `qemu-img check`: exit codes of an image that is consistent, is corrupt, has leaked clusters.
CLEAN, CORRUPT, LEAKS = 0, 2, 3


def points(profile):
    """By system and layout. A layout that is QEMU's alone is not measured with others, nor a raw disk with modes."""
    first = next(iter(servers.qemus()))
    systems = profile.of([first, ISOBATH[1]], [*servers.qemus(), *ISOBATH])
    return [Point((first + CONTROL, OVERLAY), profile.of(5, 60), once=True)] + [
        Point((who, layout), profile.of(5, 60), once=True)
        for who in systems
        for layout in profile.of([RAW, OVERLAY], [*LAYOUTS, OVERLAY + WHOLE, LAZY + WHOLE])
        if not who.startswith("isobath")
        or (layout.removesuffix(WHOLE) != LAZY and (layout != RAW or who == ISOBATH[1]))
    ]


def measure(setting, point, number):
    """Counts of all states, and of those of a storage without a volatile cache."""
    del setting, number
    system, layout = point.key
    if layout.endswith(WHOLE):
        batches = states.whole_clusters(24, 3, CLUSTER // nbd.SECTOR)
    else:
        batches = states.workload(Random(SEED), DISK // nbd.SECTOR, 60 if tools.QUICK else 300, IN_FLIGHT)
    layout = layout.removesuffix(WHOLE)
    random = Random(f"{SEED} {' '.join(point.key)}")
    total, durable, examples, seen = Counter(), Counter(), [], 0
    with tools.in_memory("power-loss") as place:
        contents, entries = recorded(system, layout, place, batches)
        flushes = not system.endswith(CONTROL)
        device = [each if flushes or not isinstance(each, nbd.Flush) else None for each in entries]
        guest = states.Guest([each for batch in batches for each in batch], entries, before(layout))
        for cut in guest.cuts(Random(SEED), 4 if tools.QUICK else 16):
            for kind in states.KINDS:
                state = states.kept(contents, device, cut, kind, random)
                counts, found = examine(system, layout, state, guest, cut, place)
                fields = asdict(found)
                examples += [f"{kind}, cut {cut}: {each}" for each in fields.pop("examples")]
                seen += 1
                total.update(counts)
                total.update({"wrong_states": int(found.wrong > 0), **fields})
                if kind == states.ALL:
                    durable.update(fields)
    writes = [each for each in entries if isinstance(each, nbd.Write)]
    return {
        "seed": SEED,
        "states": seen,
        "device_writes": len(writes),
        "device_flushes": sum(isinstance(each, nbd.Flush) for each in entries),
        **total,
        "durable": dict(durable),
        "examples": examples[:8],
    }


def directory(system):
    """Where a QEMU's programs are."""
    return servers.qemus().get(system.removesuffix(CONTROL), "")


def before(layout):
    """The guest's disk before its first request."""
    return bytes(DISK) if layout == THIN else b"".join(states.stamp(at, 0) for at in range(DISK // nbd.SECTOR))


def make(layout, place):
    """A new image on a device of a fixed length, in which other data lay before; gives its contents."""
    contents = before(layout)
    plain, image = place / "contents.raw", place / "image"
    plain.write_bytes(contents)
    stale = b"".join(b"STALE   %8d" % at * 32 for at in range(DEVICE // nbd.SECTOR))
    if layout == RAW:
        return contents + stale[DISK:]
    if layout in (FILLED, INTERNAL):
        tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", plain, image)
        if layout == INTERNAL:
            tools.run("qemu-img", "snapshot", "-c", "before", image)
    elif layout == THIN:
        tools.run("qemu-img", "create", "-q", "-f", "qcow2", image, DISK)
    else:
        base, how = place / "base.qcow2", ["-o", OPTIONS[layout]] if layout in OPTIONS else []
        tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", plain, base)
        tools.run("qemu-img", "create", "-q", "-f", "qcow2", *how, "-b", base, "-F", "qcow2", image)
    made = image.read_bytes()
    return made + stale[len(made) :]


def command(system, layout, uri, below, socket):
    """The server of an image on a device that is an NBD server's."""
    form = "raw" if layout == RAW else "qcow2"
    if system.startswith("isobath"):
        mode = ["--metadata", system.split()[1]] if layout != RAW else []
        return [
            tools.ISOBATH,
            "serve",
            uri,
            "--format",
            form,
            "--export-name",
            "disk",
            *mode,
            "--nbd",
            f"unix:{socket}",
        ]
    size = f",size={DISK}" if layout == RAW else ""
    return [
        f"{directory(system)}qemu-storage-daemon",
        "--blockdev",
        f"driver=nbd,node-name=device,server.type=unix,server.path={below},cache.direct=on",
        "--blockdev",
        f"driver={form},node-name=disk,file=device,cache.direct=on{size}",
        "--nbd-server",
        f"addr.type=unix,addr.path={socket}",
        "--export",
        "type=nbd,id=disk,node-name=disk,name=disk,writable=on",
    ]


def use(client, log, batches):
    """Sends a guest's requests, each batch once the one before it was answered."""
    for batch in batches:
        for each in batch:
            log.mark(each.number, True)
            if each.flush:
                client.send(each.number, nbd.FLUSH)
            else:
                client.send(each.number, nbd.WRITE, each.sector * nbd.SECTOR, data=each.data(), fua=each.fua)
        for _ in batch:
            log.mark(client.answered(), False)


def recorded(system, layout, place, batches):
    """The device before a guest has used its disk, and the log of what happened; the server is killed in the end."""
    contents = make(layout, place)
    below, socket = place / "below.sock", place / "disk.sock"
    with nbd.Recorder(contents, below) as device:
        with servers.Server(system, command(system, layout, device.uri, below, socket), socket, "disk") as server:
            with nbd.Client(socket, "disk") as client:
                use(client, device.log, batches)
            with device.log.lock:
                entries = list(device.log.entries)
            server.process.kill()
    return contents, entries


class Reader:
    """A program that reads an image as a power loss left it."""

    def __init__(self, check, convert):
        self.check, self.convert = check, convert

    def verdict(self, image):
        """The exit code of its check."""
        return subprocess.run([*self.check, image], capture_output=True).returncode

    def read(self, image, copy):
        """The disk; `None` if the image is refused."""
        done = subprocess.run([*self.convert, image, copy], capture_output=True)
        return copy.read_bytes() if done.returncode == 0 else None


def readers(system):
    """Who reads the images of a system: first its own program, then the other's."""
    theirs = f"{directory(system)}qemu-img"
    qemu = Reader([theirs, "check", "-f", "qcow2"], [theirs, "convert", "-f", "qcow2", "-O", "raw"])
    isobath = Reader([tools.ISOBATH, "check", "-f", "qcow2"], [tools.ISOBATH, *qemu.convert[1:]])
    return [isobath, qemu] if system.startswith("isobath") else [qemu, isobath]


def examine(system, layout, state, guest, cut, place):
    """What one state holds, as counts by name; and what was found by its system's own program."""
    counts = Counter()
    if layout == RAW:
        return counts, guest.judge(state[:DISK], cut)
    image, copy = place / "state", place / "copy.raw"
    image.write_bytes(state)
    own, other = readers(system)
    qemu = other if system.startswith("isobath") else own
    counts.update({{CLEAN: "clean", LEAKS: "leaking", CORRUPT: "corrupt"}.get(qemu.verdict(image), "refused"): 1})
    if system.startswith("isobath"):
        # As any writer that opens the image: it replays what the journal has.
        recovered = subprocess.run([*own.check, "-r", "all", image], capture_output=True).returncode
        counts["not_recovered"] += recovered != CLEAN or qemu.verdict(image) != CLEAN
    contents, again = own.read(image, copy), other.read(image, copy)
    counts["unreadable"] += contents is None
    counts["read_otherwise"] += contents is not None and again != contents
    return counts, guest.judge(contents, cut) if contents is not None else states.Found()


def section(results):
    keys = [key for key in results.keys() if results.samples(key)]

    def of(key, name):
        return results.samples(key)[0].get(name, 0)

    def durable(key, name):
        return results.samples(key)[0]["durable"].get(name, 0)

    def text(value):
        return f"{value:,}"

    def image(key, *names):
        return ["-"] * len(names) if key[1] == RAW else [text(of(key, name)) for name in names]

    after = Table(
        "After a loss of power.",
        [
            "system",
            "image",
            "states",
            "states with sectors neither old nor new",
            "such sectors",
            "zeroes",
            "older",
            "other",
            "images that are clean",
            "with leaks",
            "to be repaired",
            "refused by QEMU",
            "read otherwise by the other program",
        ],
        [
            [
                *key,
                *(text(of(key, name)) for name in ("states", "wrong_states", "wrong", "zeroes", "older", "other")),
                *image(key, "clean", "leaking", "corrupt", "refused", "read_otherwise"),
            ]
            for key in keys
        ],
        "*Old* is what a sector held when it was last flushed, *new* is all that was written to it since; a disk may"
        " have either. *Refused* are images whose journal has to be replayed. *To be repaired*: the check finds errors,"
        " or the mark that refcounts are not kept up to date; QEMU repairs the latter itself when it writes next.",
    )
    rolled = Table(
        "Without a flush, on a storage that loses nothing.",
        [
            "system",
            "image",
            "sectors whose last write is gone",
            "and the one before it",
            "requests of which a part is gone",
            "device's writes",
            "its flushes",
        ],
        [
            [
                *key,
                *(text(durable(key, name)) for name in ("rolled_back", "two_back", "torn_requests")),
                text(of(key, "device_writes")),
                text(of(key, "device_flushes")),
            ]
            for key in keys
        ],
        "A quarter of the states: all that the device was sent is there, as of one without a volatile cache. Writes"
        " were answered, and not flushed.",
    )
    chart = {
        who: {layout: durable((who, layout), "rolled_back") for layout in LAYOUTS if (who, layout) in keys}
        for who in dict.fromkeys(key[0] for key in keys if not key[0].endswith(CONTROL))
    }
    return Section(
        paper=(
            "A vendor of storage found that its tests of integrity fail from the first snapshot on where a disk is a"
            " qcow2 image on a logical volume, and that `extended_l2` makes it worse. A raw disk with `cache=none` has"
            " a write as soon as the storage has it; a qcow2 image needs metadata for it too, which QEMU keeps in"
            " memory until the next flush."
        ),
        ours=(
            f"The image lies on a device of {DEVICE >> 20} MiB, as on a logical volume, in which other data lay before;"
            " the device records what it is sent. A guest writes 512 bytes to 100 KiB at a time, up to"
            f" {IN_FLIGHT} requests in flight, in a window that moves over its {DISK >> 20} MiB, every sector with its"
            " number and its request's; some writes are to be durable by themselves (FUA), and now and then there is a"
            " flush. Or it writes whole clusters, and flushes after every third. Power is lost at 16 moments, the same"
            " for all: when a request was answered, or, up to half of them,"
            " while a flush or such a write is under way."
            " The device then has all that it was sent before its last flush, and of the writes since: "
            + "; ".join(states.KINDS.values())
            + ". Each state is read by the program that wrote it, an Isobath image after its recovery, and by the other"
            " one; each sector is compared with what it may hold. A device that ignores flushes is there to see"
            " that what is lost is found."
        ),
        parts=[
            after,
            rolled,
            figures.bars(
                results,
                "power-loss",
                "Sectors whose last write is gone, storage without a volatile cache",
                "sectors",
                chart,
            ),
            *told(results, keys),
            LAZY_TEXT if any(of(key, "wrong") for key in keys if key[1] == LAZY + WHOLE) else "",
        ],
        verdicts=verdicts(results, keys, of),
    )


# What QEMU does with `lazy_refcounts`, where that was found.
LAZY_TEXT = (
    "QEMU's defect with `lazy_refcounts`: an L2 table may refer to a new cluster only once that is on disk. Where a"
    " write copies the rest of a cluster from below, or refcounts are kept up to date, QEMU flushes the device before"
    " it writes the table. Of a cluster that the guest writes as a whole it need copy nothing, and with"
    " `lazy_refcounts` there are no refcounts to write first: data and table go to the device with no flush between"
    " them, and one flush behind both. If power is lost before that, the table may be there without the data, and the"
    " guest reads what lay on the device before: another disk's data, on a logical volume."
)


def told(results, keys):
    """What was found wrong, by example."""
    found = [key for key in keys if not key[0].endswith(CONTROL)]
    wrong = [f"- {' / '.join(key)}: {each}" for key in found for each in results.samples(key)[0]["examples"][:4]]
    return ["Examples of what is neither old nor new:\n\n" + "\n".join(wrong)] if wrong else []


def verdicts(results, keys, of):
    """Of Isobath: nothing may be wrong."""
    found = []
    for key in keys:
        if key[0].endswith(CONTROL):
            missed = float(not of(key, "wrong"))
            found.append(Verdict("flushes ignored: whether nothing was found", 0, missed, None, "equal", "", "{:.0f}"))
    for who in ISOBATH:
        own = [key for key in keys if key[0] == who]
        if not own:
            continue
        for name, what in (
            ("wrong", "sectors neither old nor new"),
            ("not_recovered", "images that are not clean after a recovery"),
            ("unreadable", "images that cannot be read"),
            ("read_otherwise", "images that QEMU reads otherwise"),
        ):
            total = float(sum(of(key, name) for key in own))
            found.append(Verdict(f"{who}: {what}", 0, total, None, "equal", "", "{:,.0f}"))
    return found
