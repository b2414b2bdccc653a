"""Writes to new clusters with a flush behind each: one writer to 64, on a simulated or a real disk."""

from .. import plot, report, tools
from ..flush.latency import spread, text_of_ratio
from ..rounds import Samples, rotated
from . import contenders, loads, places
from .contenders import GOAL, RAW

KIB = {4096: "4 KiB", 64 << 10: "64 KiB"}
SEQUENTIAL, RANDOM = "sequential", "random"
# Writes of one measurement at most.
MOST = 40_000


class Sync:
    """The part on one disk."""

    def __init__(self, where, data="compressible"):
        self.where = where
        self.data = data
        self.options = loads.COMPRESSIBLE if data == "compressible" else loads.INCOMPRESSIBLE
        self.writers = [1, 4, 16, 64] if data == "compressible" else [1, 16]

    def size(self):
        """A disk in memory is thin, and far wider than what is written of it."""
        if self.where in places.SIMULATED:
            return 64 << 30
        return 64 << 20 if tools.QUICK else 1 << 30

    def measure(self, place, contender, pattern, block, writers, seconds, seed):
        with contender.fresh(place, self.size()) as (server, _):
            if pattern == SEQUENTIAL:
                where = loads.sequential(self.size(), block, writers, MOST)
            else:
                where = loads.scattered(self.size(), block, writers, MOST, seed)
            return loads.write_and_flush(server, where, block, seconds, self.options)

    def run(self, rounds, seconds):
        samples = Samples()
        everybody = contenders.everybody()
        names = list(everybody)
        cases = [
            (pattern, block, writers) for pattern in (SEQUENTIAL, RANDOM) for block in KIB for writers in self.writers
        ]
        with places.place(self.where) as place:
            for number in range(rounds):
                for case in cases:
                    for name in rotated(names, number):
                        samples.attempt(
                            (*case, name), lambda: self.measure(place, everybody[name], *case, seconds, number)
                        )
        return {"samples": samples.raw()} | self.summary(samples, names, cases)

    def summary(self, samples, names, cases):
        def rate(case, name):
            return samples.median((*case, name), "flushes_per_second")

        others = [name for name in names if name != GOAL]
        rows, bars = [], {}
        for case in cases:
            pattern, block, writers = case
            own = rate(case, GOAL)
            rows.append([
                pattern, KIB[block], writers, *(samples.text((*case, name), "flushes_per_second") for name in names),
                *(text_of_ratio(report.ratio(own, rate(case, name))) for name in others),
                spread(samples, (*case, GOAL), "flushes_per_second") if own else "-",
            ])  # fmt: skip
            bars[f"{KIB[block]} {pattern}, {writers} writer{'s' * (writers > 1)}"] = {
                name: rate(case, name) or None for name in names
            }
        table = {
            "title": f"Writes with a flush behind each, {self.data} data, {self.where}",
            "text": (
                "Writes a second to clusters that are new (4 KiB sequential: each sixteenth is), each writer waiting"
                " for its flush; then embedded ÷ each of the others."
            ),
            "columns": ["pattern", "block", "writers", *names, *(f"÷ {name}" for name in others), "spread"],
            "rows": rows,
        }
        goals = []
        if self.data == "compressible":
            for pattern in (SEQUENTIAL, RANDOM):
                for writers in (1, 16):
                    case = (pattern, 64 << 10, writers)
                    for name in (*contenders.qemu_names()[:1], RAW):
                        value = report.ratio(rate(case, GOAL), rate(case, name))
                        what = f"{self.where}, 64 KiB {pattern}, {writers} writers: embedded ÷ {name}"
                        limit = 0.9 if name == RAW else 2
                        goals.append(
                            report.limit(what, value, at_least=limit, why=None if value else "no mode embedded")
                        )
        suffix = "" if self.data == "compressible" else f"-{self.data}"
        figure = plot.bars(
            f"embedded-sync-{self.where}{suffix}.svg",
            f"Writes with a flush behind each, {self.data}, {self.where}",
            "writes a second",
            bars,
            log=True,
        )
        notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
        return {"tables": [table], "goals": goals, "figures": [figure], "notes": contenders.missing_note() + notes}
