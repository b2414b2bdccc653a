"""Has experiments measured: a round of all of them after the other, each in another order, with what is on record left
out."""

import statistics
import time
import traceback

from isobath_bench import servers, tools
from isobath_bench.rounds import rotated

from .progress import Progress

# The sample of what has crashed in an earlier round.
AS_BEFORE = {"failed": "crashed", "why": "as in the round before"}


class Work:
    """One measurement that is to be made."""

    def __init__(self, experiment, point, number):
        self.experiment = experiment
        self.point = point
        self.number = number


def planned(experiment, profile, number):
    """The measurements of an experiment in a round, in order."""
    points = experiment.points(profile)
    if len({point.key for point in points}) < len(points):
        raise ValueError(f"{experiment.name} has two points of one key")
    # Steps of a prime bring every point to every place.
    return [
        Work(experiment, point, number)
        for point in rotated(points, number * 7)
        if point.rounds is None or number < point.rounds
    ]


class Estimate:
    """How long measurements take: as long as the same point did, else what was said of it, as far as that was true."""

    def __init__(self):
        self.took = {}
        self.said = self.measured = 0.0

    def add(self, experiment, point, seconds):
        self.took.setdefault((experiment.name, point.key), []).append(seconds)
        self.said += point.seconds
        self.measured += seconds

    def of(self, work):
        took = self.took.get((work.experiment.name, work.point.key))
        if took:
            return statistics.median(took)
        # Guesses are believed at first, and corrected by what came of them.
        return work.point.seconds * (self.measured + 60) / (self.said + 60)


def run(experiments, profile, kept):
    """Measures what is missing on record, a round of all experiments after the other; gives how many measurements
    failed."""
    estimate, there, failed = Estimate(), set(), 0
    for experiment in experiments:
        points = {point.key: point for point in experiment.points(profile)}
        for record in kept.records(experiment):
            key, sample = tuple(record["key"]), record["sample"]
            if key in points:
                estimate.add(experiment, points[key], record["seconds"])
            # What failed is tried again by the next run, but for what crashed.
            if "failed" not in sample or sample["failed"] == "crashed":
                there.add((experiment.name, key, record["round"]))
    batches = []
    for number in range(profile.rounds):
        for experiment in experiments:
            works = planned(experiment, profile, number)
            batches.append(
                (experiment, [work for work in works if (experiment.name, work.point.key, number) not in there])
            )
    everything = [work for _, works in batches for work in works]
    progress, crashed = Progress(len(everything)), set()
    for experiment, works in batches:
        if not works:
            continue
        progress.note(f"{experiment.name}, round {works[0].number + 1}: {experiment.module.TITLE}")
        done = progress.done
        try:
            with experiment.setting(profile) as setting:
                for work in works:
                    name = f"{experiment.name} {' / '.join(map(str, work.point.key))}"
                    progress.show(name, sum(map(estimate.of, everything[progress.done :])))
                    began = time.monotonic()
                    sample = (
                        AS_BEFORE
                        if (experiment.name, work.point.key) in crashed
                        else attempt(experiment, setting, work)
                    )
                    seconds = time.monotonic() - began
                    if "failed" in sample:
                        failed += 1
                        crashed |= {(experiment.name, work.point.key)} if sample["failed"] == "crashed" else set()
                        progress.note(f"{name}: {sample['why'][:500]}")
                    kept.add(experiment, work.point, work.number, seconds, sample)
                    estimate.add(experiment, work.point, seconds)
                    progress.step()
        except tools.Failed as error:
            # What all its points share could not be made: the others go on.
            progress.note(f"{experiment.name}: {error}")
            failed += done + len(works) - progress.done
            progress.done = done + len(works)
    progress.close()
    return failed


def attempt(experiment, setting, work):
    """The sample of a measurement, or how it failed."""
    try:
        return experiment.module.measure(setting, work.point, work.number)
    except servers.Crashed as error:
        return {"failed": "crashed", "why": str(error)}
    except tools.Failed as error:
        return {"failed": "failed", "why": str(error)}
    except Exception as error:
        # A run takes an hour: one mistake must not end it, and is on record with its place.
        return {"failed": "failed", "why": "".join(traceback.format_exception(error))[-1500:]}
