"""What was measured, kept: one line of JSON for each measurement, written as soon as it is known.

A run goes on where the last one ended; one that had ended starts anew.
"""

import hashlib
import json
import os
import shutil
import time
from functools import cache

from isobath_bench import report, tools

from . import PAPERS

# Runs under way, and quick ones; what a full run found goes to `KEPT` when it is through.
RUNS = tools.WORK / "papers"
RESULTS = tools.ROOT / "docs" / "results"
KEPT = RESULTS / "raw"


@cache
def program():
    """What tells one build of isobath from another: a part of the SHA-256 of the program."""
    return hashlib.sha256(tools.ISOBATH.read_bytes()).hexdigest()[:12]


def read(path):
    """The records of a file; a last line that was cut off does not count."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records


def last(path):
    """The records of a file that count: of each measurement the last, unless it was thrown away."""
    found = {}
    for each in read(path):
        if "discarded" in each:
            for key in each["keys"]:
                found.pop((tuple(key), each["round"]), None)
        else:
            found[tuple(each["key"]), each["round"]] = each
    return list(found.values())


def discarded(path):
    """What was thrown away of a file: a record for each round that was begun."""
    return [each for each in read(path) if "discarded" in each]


def machine_of(directory, experiment=None):
    """The file that says what the records in a directory were made on: the papers' all together, or those of one
    experiment that is of no paper."""
    return directory / (f"{experiment.name}.machine.json" if experiment else "machine.json")


class Run:
    """The records of a run of a profile, in a directory of their own."""

    def __init__(self, profile):
        self.directory = RUNS / profile.name / "raw"
        self.done = RUNS / profile.name / "done"
        self.profile = profile

    @property
    def through(self):
        """Whether it was through once: then it can only begin anew, or be corrected."""
        return self.done.exists()

    def begin(self, fresh):
        """Goes on with a run; a fresh one forgets what is on record."""
        if fresh:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.done.unlink(missing_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        path, machine = machine_of(self.directory), about(self.profile)
        if path.exists():
            machine["began"] = json.loads(path.read_text())["began"]
        path.write_text(json.dumps(machine, indent=1) + "\n")

    def end(self):
        """Marks the run as through; a full one is kept."""
        self.done.touch()
        if not self.profile.quick:
            for name in PAPERS:
                for path in KEPT.glob(f"{name}.*"):
                    path.unlink()
            shutil.copytree(self.directory, KEPT, dirs_exist_ok=True)

    def path(self, experiment):
        return self.directory / f"{experiment.name}.jsonl"

    def records(self, experiment):
        """What is on record of an experiment: of each measurement the last."""
        return last(self.path(experiment))

    def forget(self, experiment):
        self.path(experiment).unlink(missing_ok=True)

    def add(self, experiment, point, number, seconds, sample):
        """Adds a measurement, and has it on disk."""
        record = {
            "key": list(point.key),
            "round": number,
            "seconds": round(seconds, 3),
            "isobath": program(),
            "sample": sample,
        }
        self.write(experiment, record)

    def discard(self, experiment, keys, number, why):
        """Has what was measured of some points in a round not count: it stays in the file, and why is behind it."""
        self.write(experiment, {"discarded": why, "round": number, "keys": [list(key) for key in keys]})

    def write(self, experiment, record):
        """Adds a line, and has it on disk."""
        path = self.path(experiment)
        # A line that was cut off stays by itself.
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        with open(path, "a") as file:
            file.write("\n" * cut + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Beyond(Run):
    """The records of experiments that are of no paper: each is through by itself, and begins anew when it is run."""

    def __init__(self, profile, experiments):
        super().__init__(profile)
        self.directory = RUNS / profile.name / "beyond"
        self.experiments = experiments

    @property
    def through(self):
        """It is never corrected: all that is asked for is counted again."""
        return False

    def begin(self, fresh):
        """Goes on with those experiments of which something is missing; a fresh run with none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for each in self.experiments:
            points = {point.key for point in each.points(self.profile)}
            measured = {tuple(one["key"]) for one in self.records(each) if "failed" not in one["sample"]}
            path, machine = machine_of(self.directory, each), about(self.profile)
            if fresh or points <= measured:
                self.forget(each)
            elif path.exists():
                machine["began"] = json.loads(path.read_text())["began"]
            path.write_text(json.dumps(machine, indent=1) + "\n")

    def end(self):
        """Keeps what a full run has counted."""
        if not self.profile.quick:
            for each in self.experiments:
                for path in (self.path(each), machine_of(self.directory, each)):
                    shutil.copy(path, KEPT)


def about(profile):
    """What a run was made on, and how."""
    return report.machine() | {
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "isobath_build": program(),
        "commit": commit(),
        "profile": profile.name,
        "rounds": profile.rounds,
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def commit():
    """The commit of the sources, with a mark if they were changed since."""
    try:
        return tools.run("git", "-C", tools.ROOT, "describe", "--always", "--dirty").strip()
    except (tools.Failed, FileNotFoundError):
        return "unknown"
