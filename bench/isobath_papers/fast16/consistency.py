"""Crashes: images as crashes would leave them, each recovered and judged; as many as in the paper, and a thousand times
as many."""

import os
import re
import shutil

from isobath_bench import tools
from isobath_bench.flush import mounts

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Verdict

NAME = "consistency"
TITLE = "Crashes"
SOURCE = "FAST '16, section 4.1"

FILES, SIMULATED = "files", "simulated"
# The paper's workloads: appends, each with an fdatasync; appends and overwrites, likewise.
WORKLOADS = {"append": "append", "overwrite": "append + overwrite"}
MODES = ["auto", "journal", "embedded", "ordered"]
STATES, WIDE = 200, 400_000
SEED = 20160222
PASSED = {
    FILES: re.compile(
        r"(?P<states>\d+) states passed, (?P<different>\d+) of them different; before recovery (?P<refused>\d+) refused"
        r" by QEMU, (?P<leaking>\d+) leaking; "
        r"(?P<read_by_qemu>\d+) read by QEMU; lost: data in (?P<data>\d+), metadata in (?P<metadata>\d+), journal in"
        r" (?P<journal>\d+);"
    ),
    SIMULATED: re.compile(
        r"(?P<states>\d+) states of (?P<histories>\d+) histories passed in \d+ s .*?, (?P<judged_by_qemu>\d+) judged by"
        r" QEMU"
    ),
}
RECOVERIES = {"crashed": r"(\d+)\s+crashed in recovery$", "crashed_twice": r"(\d+)\s+crashed in recovery of recovery$"}


def points(profile):
    """By method, workload (of the simulator: all its histories), and mode."""
    files = [
        Point((FILES, load, mode), profile.of(2, 5), once=True)
        for load in WORKLOADS
        for mode in profile.of(MODES[:2], MODES)
    ]
    return files + [
        Point((SIMULATED, "all", mode), profile.of(2, 35), once=True) for mode in profile.of(MODES[:2], MODES)
    ]


def states(method):
    """States of one point."""
    if method == FILES:
        return 10 if tools.QUICK else STATES
    return 200 if tools.QUICK else WIDE // len(MODES)


def setting(profile):
    """A file system on a device that promises to write no more than a sector whole: states have writes torn within 4
    KiB."""
    del profile
    return mounts.mounted("ext4")


def measure(system, point, number):
    del number
    method, load, mode = point.key
    program = tools.ISOBATH.with_name("isobath-crash-files" if method == FILES else "isobath-crash")
    if not program.exists():
        raise tools.Failed(f"{program} is not there: make build")
    words = [
        program,
        "--states",
        states(method),
        "--seed",
        SEED,
        "--mode",
        mode,
        *(["--workload", load] if method == FILES else []),
    ]
    try:
        said = tools.run(*words, cwd=system.directory, env=os.environ | {"TMPDIR": str(system.directory)})
    except tools.Failed:
        for image in system.directory.glob("isobath-crash-*"):
            shutil.move(image, tools.WORK / image.name)
        raise
    found = PASSED[method].search(said)
    if not found:
        raise tools.Failed(f"{program.name} said something else: {said[-500:]}")
    counted = {name: int(value) for name, value in found.groupdict().items()}
    for name, pattern in RECOVERIES.items():
        seen = re.search(pattern, said, re.M)
        counted[name] = int(seen.group(1)) if seen else 0
    return counted | {"seed": SEED, "failed_states": 0}


def section(results):
    files = [(FILES, load, mode) for load in WORKLOADS for mode in MODES if (FILES, load, mode) in results.keys()]
    wide = [(SIMULATED, "all", mode) for mode in MODES if (SIMULATED, "all", mode) in results.keys()]
    kinds = ("data", "metadata", "journal")
    groups = {
        f"{load}, {mode}": {kind: results.median((FILES, load, mode), kind) for kind in kinds}
        for _, load, mode in files
    }

    def cells(key, *fields):
        return [results.text(key, field) for field in fields]

    first = Table(
        f"The paper's method on real files, seed {SEED}.",
        [
            "workload",
            "mode",
            "states",
            "different ones",
            "refused by QEMU before recovery",
            "leaking before recovery",
            "lost data",
            "lost metadata",
            "lost journal",
            "read by QEMU too",
        ],
        [
            [
                WORKLOADS[load],
                mode,
                *cells((FILES, load, mode), "states", "different", "refused", "leaking", *kinds, "read_by_qemu"),
            ]
            for _, load, mode in files
        ],
    )
    second = Table(
        f"The simulator, seed {SEED}.",
        [
            "mode",
            "states",
            "histories",
            "crashed in the recovery too",
            "and in the recovery of that",
            "judged by QEMU too",
        ],
        [[key[2], *cells(key, "states", "histories", "crashed", "crashed_twice", "judged_by_qemu")] for key in wide],
    )
    return Section(
        paper=(
            "The writes and syncs of a guest's workload were recorded on the host; then a sync was chosen, all before"
            " it applied to a copy of the image, and some of the writes after it, and `qemu-img check` judged that. 200"
            " states of each of two workloads, in which data, metadata, journal records and commit blocks were lost:"
            " all were consistent."
        ),
        ours=(
            f"The same with a real server on real files, {states(FILES) if not results.profile.quick else 10} states of"
            " each workload in each mode; every state is recovered, checked by `qemu-img check`, and each of its bytes"
            " held against what was promised, which the paper did not do. The files lie on a device that promises to"
            " write no more than 512 bytes whole. And a thousand times as many states of the crash simulator, over all"
            " its fourteen kinds of histories, with torn writes, faults of the storage, and crashes in recoveries. A"
            " state that is not as promised ends the program, and is a failure below."
        ),
        parts=[
            figures.bars(results, "crashes", "What the states on real files had lost", "states that lost some", groups),
            first,
            second,
        ],
        verdicts=verdicts(results, files, wide),
    )


def verdicts(results, files, wide):
    """Failures, none of which there are to be; and how many states there were."""
    found = []
    for what, keys, paper in (
        ("the paper's method, real files", files, STATES * len(WORKLOADS)),
        ("simulated", wide, WIDE),
    ):
        broken = sum(results.failure(key) is not None for key in keys)
        total = sum(results.median(key, "states") or 0 for key in keys)
        found.append(
            Verdict(f"{what}: campaigns in which a state failed", 0, float(broken), None, "equal", "", "{:.0f}")
        )
        why = "a quick run" if results.profile.quick else "campaigns that failed end early"
        found.append(Verdict(f"{what}: states that passed", paper, total, None, "higher", why, "{:,.0f}"))
    return found
