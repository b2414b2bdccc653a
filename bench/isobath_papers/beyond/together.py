"""All four systems at once: a long chain with an index, the journal, mappings in the data, an adaptive stream, and an
application on it."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time

from isobath_bench import tools
from isobath_bench.depth import chains
from isobath_bench.flush import mounts
from isobath_bench.live.control import Qmp

from ..page import Section, Table
from ..plan import Point
from ..stage import disks, ycsb
from ..verdict import Verdict

NAME = "together"
TITLE = "All four systems at once"
SOURCE = "SVD, FAST '16, Selfie, Adaptive streaming"

MODES = ["isobath ordered", "isobath journal", "isobath embedded"]
FIELDS = {"fields": 10, "field_bytes": 100}
# Of the database in memory, and of its log: small, so that there are many flushes, and the disk does not fill.
WRITE_BUFFER = 4 << 20
# Half reads, half updates.
WORKLOAD = "a"
# Seconds that a job and the application are given: no measure, but an end.
PATIENCE = 600


def layers():
    return 20 if tools.QUICK else 1000


def records():
    return 500 if tools.QUICK else 20_000


def size():
    """Bytes of the disk."""
    return (256 if tools.QUICK else 1024) << 20


def points(profile):
    return [Point((who,), profile.of(5, 60), once=True) for who in profile.of(MODES[2:], MODES)]


@contextlib.contextmanager
def setting(profile):
    """A chain whose disk has a file system with a database, spread over all layers, and an index on top."""
    del profile
    place = tools.WORK / "together"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        raw = place / "database.raw"
        tools.run("truncate", f"--size={size()}", raw)
        with mounts.attached(raw, make=disks.MAKE) as (_, mount):
            ycsb.run("load", mount / "db", records=records(), **FIELDS)
            tools.run("fstrim", mount)
        below = layers() - 1
        chains.generate(place / "chain", below, "--data", f"raw:{raw}", "--indexed")
        raw.unlink()
        yield chains.active_of(place / "chain", below)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def chain_of(image):
    """What `isobath info` says of each layer, from the active one down."""
    return json.loads(tools.run(tools.ISOBATH, "info", "--backing-chain", "--output", "json", image))


def measure(below, point, number):
    del number
    (who,) = point.key
    image = below.with_name("active.qcow2")
    image.unlink(missing_ok=True)
    tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", below.name, "-F", "qcow2", image)
    found = {"index": chains.index_bytes(image) is not None, "layers": len(chain_of(image))}
    control = tools.WORK / "together.qmp"
    control.unlink(missing_ok=True)
    options = {"records": records(), "write_buffer": WRITE_BUFFER, **FIELDS}
    with (
        disks.serve(who, image, "--qmp", f"unix:{control}") as server,
        Qmp(control) as qmp,
        disks.mounted(server, make=None) as system,
    ):
        database = system.directory / "db"
        # It goes on until it is told to end, so that all of the job has it beside it.
        words = ycsb.command("run", database, workload=WORKLOAD, seconds=PATIENCE, seed=3, **options)
        load = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_writes(system, load)
            qmp.do("block-stream", device=disks.EXPORT, job_id="stream")
            found["job"] = qmp.wait_for_job(PATIENCE) is not None
            found["beside"] = load.poll() is None
        finally:
            load.terminate()
            out, error = load.communicate(timeout=PATIENCE)
        if load.returncode != 0:
            raise tools.Failed(f"YCSB has failed: {error[-500:]}")
        found["operations"] = json.loads(out)["operations"]
        # The database opens again, and has all its keys.
        again = ycsb.run("run", database, workload="c", operations=records(), seed=4, **options)
        found["read_again"] = again["operations"]
    found["layers_after"] = len(chain_of(image))
    found["check"] = subprocess.run(["qemu-img", "check", "-q", image], capture_output=True).returncode
    found["same"], found["file_system"] = compared(image)
    image.unlink()
    return found


def wait_for_writes(system, load):
    """Until the application's first updates have reached the disk."""
    name, until = f"/sys/block/{system.device.name}/stat", time.monotonic() + PATIENCE

    def written():
        with open(name) as file:
            return int(file.read().split()[6])

    first = written()
    while written() == first:
        if load.poll() is not None or time.monotonic() > until:
            raise tools.Failed("YCSB does not begin")
        time.sleep(0.01)


def compared(image):
    """Whether QEMU and Isobath read the same disk, and what e2fsck says of it."""
    copy, digests = image.with_name("copy.raw"), []
    try:
        for program in ("qemu-img", tools.ISOBATH):
            tools.run(program, "convert", "-f", "qcow2", "-O", "raw", image, copy)
            with copy.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").digest())
        return digests[0] == digests[1], subprocess.run(["e2fsck", "-f", "-n", copy], capture_output=True).returncode
    finally:
        copy.unlink(missing_ok=True)


def section(results):
    keys = [key for key in results.keys() if results.samples(key)]
    rows, verdicts = [], []
    for key in keys:
        found = results.samples(key)[0]
        (who,) = key
        rows.append(
            [
                who,
                *(f"{found[name]:,}" for name in ("layers", "layers_after", "operations", "read_again")),
                *("yes" if found[name] else "no" for name in ("index", "beside", "same")),
                found["check"],
                found["file_system"],
            ]
        )
        wrong = [
            not found["index"],
            not found["job"],
            not found["beside"],
            found["layers_after"] != 1,
            not found["same"],
            found["check"] != 0,
            found["file_system"] != 0,
        ]
        verdicts.append(Verdict(f"{who}: what is not as it must be", 0, float(sum(wrong)), None, "equal", "", "{:.0f}"))
    return Section(
        paper=(
            "Each paper has its own system, on its own. Whether a chain's index, the journal, mappings in the data and"
            " a stream that gives way get along is what none can say."
        ),
        ours=(
            f"An ext4 with a RocksDB of {records() if not results.profile.quick else 500:,} records lies in"
            f" {layers() - 1 if not results.profile.quick else 19:,} layers, spread evenly; above is an active layer"
            " with an index. `isobath serve` shows it with each `--metadata`; `embedded` is the journal, too. YCSB's"
            " workload A runs on it while an adaptive block-stream copies all layers into the active one. Then the"
            " database is opened anew and read, the image checked by QEMU and read by both programs, and the file"
            " system checked. This is a small run beside other work on the machine, with the image in the page cache:"
            " it shows that all work together, and says nothing of how fast they do."
        ),
        parts=[
            Table(
                "All at once.",
                [
                    "server",
                    "layers before",
                    "and after the job",
                    "operations beside it",
                    "reads after it",
                    "has an index",
                    "YCSB ran to the job's end",
                    "QEMU reads the same",
                    "`qemu-img check`",
                    "`e2fsck`",
                ],
                rows,
                "The last two are exit codes: 0 is in order.",
            )
        ],
        verdicts=verdicts,
    )
