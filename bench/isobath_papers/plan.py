"""What is measured: profiles, points, experiments.

An experiment is a module with `NAME`, `TITLE`, `SOURCE` and

- `points(profile)`: all that is measured, a list of `Point`,
- `measure(setting, point, number)`: one measurement, in round `number`; gives a dict that JSON can hold, or raises
  `tools.Failed`,
- `section(results)`: the section of the paper's page, made from what is on record alone,
- `setting(profile)`, optional: a context manager of what all its points share.
"""

import contextlib
import importlib
from dataclasses import dataclass

from . import BEYOND, PAPERS

# Rounds at least; those of what is within a part of the paper's ratio.
ROUNDS, CLOSE_ROUNDS, CLOSE = 3, 5, 0.1


@dataclass(frozen=True)
class Profile:
    """How thoroughly: `quick` tries everything out, and its figures mean nothing."""

    quick: bool
    # Of all points.
    rounds: int
    # Further ones, of the points whose ratios are close to the paper's.
    further: int = 0

    @property
    def name(self):
        return "quick" if self.quick else "full"

    def of(self, quick, full):
        """A parameter by profile."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Point:
    """One thing to measure: a contender and its circumstances."""

    key: tuple
    # What one measurement may take, for the first estimate.
    seconds: float = 5.0
    # Whether one round is enough: what is counted is the same each time.
    once: bool = False


@dataclass(frozen=True)
class Experiment:
    """An experiment of a paper, by its module."""

    paper: str
    module: object

    @property
    def name(self):
        return f"{self.paper}.{self.module.NAME}"

    @property
    def beyond(self):
        """Whether it is of no paper."""
        return self.paper in BEYOND

    def points(self, profile):
        return self.module.points(profile)

    def setting(self, profile):
        """What its points share, as a context manager."""
        make = getattr(self.module, "setting", None)
        return make(profile) if make else contextlib.nullcontext()


def paper(name):
    """The package of a paper."""
    return importlib.import_module(f"isobath_papers.{name}")


def experiments(papers=PAPERS):
    """The experiments of some papers, in the order of the pages."""
    return [Experiment(name, module) for name in papers for module in paper(name).EXPERIMENTS]
