"""Has experiments measured: a round of all of them after the other, each in another order, with what is on record left
out, and what was measured while the machine was busy thrown away."""

import statistics
import time
import traceback

from isobath_bench import servers, tools
from isobath_bench.rounds import rotated

from . import page, plan, quiet
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
    return [Work(experiment, point, number) for point in rotated(points, number * 7) if not (point.once and number)]


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


class Run:
    """A run under way: what is on record of it, and what failed."""

    def __init__(self, experiments, profile, kept, watch):
        self.experiments, self.profile, self.kept, self.watch = experiments, profile, kept, watch
        self.estimate, self.there, self.crashed, self.failed = Estimate(), set(), set(), 0
        for experiment in experiments:
            points = {point.key: point for point in experiment.points(profile)}
            for record in kept.records(experiment):
                key, sample = tuple(record["key"]), record["sample"]
                if key in points:
                    self.estimate.add(experiment, points[key], record["seconds"])
                # What failed is tried again by the next run, but for what crashed.
                if "failed" not in sample or sample["failed"] == "crashed":
                    self.there.add((experiment.name, key, record["round"]))

    def missing(self, experiment, number, keys=None):
        """The measurements of a round that are not on record: of all points, or of those of some keys."""
        return [
            work
            for work in planned(experiment, self.profile, number)
            if (experiment.name, work.point.key, number) not in self.there and (keys is None or work.point.key in keys)
        ]

    def measure(self, rounds, keys=None):
        """Measures what is missing of some rounds, one after the other; `keys`: by experiment, those of the points."""
        batches = [
            (experiment, self.missing(experiment, number, keys and keys[experiment.name]))
            for number in rounds
            for experiment in self.experiments
        ]
        everything = [work for _, works in batches for work in works]
        progress = Progress(len(everything))
        try:
            for experiment, works in batches:
                if not works:
                    continue
                progress.note(f"{experiment.name}, round {works[0].number + 1}: {experiment.module.TITLE}")
                self.quietly(experiment, works, progress, everything)
        finally:
            progress.close()

    def quietly(self, experiment, works, progress, everything):
        """Measures a round of an experiment, again if the machine was busy."""
        done, number = progress.done, works[0].number
        for _ in range(quiet.TRIES):
            self.watch.wait(progress.note)
            progress.done = done
            try:
                failed, why = self.round(experiment, works, progress, everything)
            except tools.Failed as error:
                # What all its points share could not be made: the others go on.
                progress.note(f"{experiment.name}: {error}")
                failed, why = done + len(works) - progress.done, None
                progress.done = done + len(works)
            if why is None:
                self.failed += failed
                return
            progress.note(f"{experiment.name}, round {number + 1}, is thrown away: {why}")
        raise quiet.Busy(
            f"{experiment.name}, round {number + 1}, was thrown away {quiet.TRIES} times, at last since {why}. Run this"
            " again when nothing else runs: the other rounds are on record, and the next run goes on from there"
        )

    def round(self, experiment, works, progress, everything):
        """Measures a round of an experiment; gives how many measurements failed, and why it does not count, if so."""
        failed, measured = 0, []
        with experiment.setting(self.profile) as setting:
            self.watch.begin()
            try:
                for work in works:
                    name = f"{experiment.name} {' / '.join(map(str, work.point.key))}"
                    progress.show(name, sum(map(self.estimate.of, everything[progress.done :])))
                    began = time.monotonic()
                    before = (experiment.name, work.point.key) in self.crashed
                    sample = AS_BEFORE if before else attempt(experiment, setting, work)
                    seconds = time.monotonic() - began
                    if "failed" in sample:
                        failed += 1
                        if sample["failed"] == "crashed":
                            self.crashed.add((experiment.name, work.point.key))
                        progress.note(f"{name}: {sample['why'][:500]}")
                    self.kept.add(experiment, work.point, work.number, seconds, sample)
                    measured.append(work.point.key)
                    self.estimate.add(experiment, work.point, seconds)
                    progress.step()
                    self.watch.look()
            finally:
                # A round that was interrupted is judged as far as it got.
                why = self.watch.end() if measured else None
                if why is not None:
                    self.kept.discard(experiment, measured, works[0].number, why)
        return failed, why

    def close(self, experiment):
        """The keys of the points whose ratios are so close to the paper's that further rounds may decide; what these
        find is left out, so that an interrupted run decides as before."""
        records = [each for each in self.kept.records(experiment) if each["round"] < self.profile.rounds]
        repeated = {point.key for point in experiment.points(self.profile) if not point.once}
        keys = set()
        for verdict in page.verdicts_of(experiment, self.profile, records) if records else []:
            if verdict.close(plan.CLOSE):
                keys |= set(verdict.points) or repeated
        return keys & repeated


def run(experiments, profile, kept, watch):
    """Measures what is missing on record, a round of all experiments after the other, then further rounds of what is
    close to the paper's; gives how many measurements failed."""
    state = Run(experiments, profile, kept, watch)
    state.measure(range(profile.rounds))
    if profile.further:
        keys = {experiment.name: state.close(experiment) for experiment in experiments}
        state.measure(range(profile.rounds, profile.rounds + profile.further), keys)
    return state.failed


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
