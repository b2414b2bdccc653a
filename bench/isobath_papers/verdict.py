"""Verdicts: a figure of a paper's beside ours and, where it is not reached, why.

A goal that is missed has a class. `ours`, `machine` and `scale` are said in the experiment's module, beside the reason.
That the baseline moved is not said but computed: from what the paper's QEMU and today's take, each ÷ the raw disk of
its machine. Where today's takes less of it, the paper's ratio over QEMU says nothing about Isobath.
"""

import enum
from dataclasses import dataclass

from isobath_bench import tools

from .stats import spread_text


class Unclassified(tools.Failed):
    """Goals that are missed without a class or a reason."""


class Cause(enum.Enum):
    """Whose a missed goal is, where it is not the baseline's."""

    # Isobath's: what the reason says could be done better, or is wanted so.
    OURS = "ours"
    # Of what is measured on: processors, the emulated guest, the host's file system.
    MACHINE = "machine"
    # Of sizes and times, which are smaller here than the paper's, or loads, which differ.
    SCALE = "scale"


class Outcome(enum.Enum):
    """What is said of a row. The classes of a missed goal have the values of `Cause`."""

    REACHED = "reached"
    MOVED = "baseline moved"
    AS_PAPER = "as in the paper"
    OURS = "ours"
    MACHINE = "machine"
    SCALE = "scale"
    UNCLASSIFIED = "unclassified"
    NOT_COMPARABLE = "not comparable"

    @property
    def missed(self):
        return self in (Outcome.OURS, Outcome.MACHINE, Outcome.SCALE, Outcome.UNCLASSIFIED)


@dataclass(frozen=True)
class Baseline:
    """What the paper's QEMU and today's take for the same work ÷ what a reference takes: the less, the less there is to
    be gained over QEMU."""

    # What is divided by what.
    measure: str
    paper: float
    today: float | None
    # The row that compares Isobath with the paper's prototype without QEMU, each ÷ the raw disk of its machine. Without
    # one the goal is taken to today's QEMU.
    instead: str = ""
    # The paper has its QEMU ÷ its prototype alone. A prototype takes no less than the raw disk, so that QEMU took at
    # least so much of it.
    at_least: bool = False
    form: str = "{:,.2f}x"


@dataclass(frozen=True)
class Verdict:
    """A ratio of the paper's beside ours."""

    what: str
    paper: float | None
    ours: float | None
    # Half the range of the rounds' ratios, as a part of their median.
    spread: float | None = None
    # What is good: `higher`, `lower`, or `equal`, which is within a tenth.
    better: str = "higher"
    # Why it differs, where it does.
    why: str = ""
    form: str = "{:,.2f}x"
    # Whose it is if it is missed, and the baseline did not move.
    cause: Cause | None = None
    baseline: Baseline | None = None
    # Whether it compares today's QEMU with the paper's: that is nobody's goal.
    check: bool = False
    # The keys of the points that it is made of; none: there is no telling which.
    points: tuple = ()

    @property
    def slack(self):
        """3 %, or the spread of ours."""
        return max(0.03, min(self.spread or 0, 0.2))

    def as_good_as(self, goal):
        """Whether ours is as good as a goal."""
        if self.better == "equal":
            return abs(self.ours / goal - 1) <= max(0.1, self.slack) if goal else abs(self.ours) < 0.005
        if self.better == "higher":
            return self.ours >= goal * (1 - self.slack)
        return self.ours <= goal * (1 + self.slack)

    @property
    def reached(self):
        """Whether ours is as good as the paper's; `None` if there is no telling."""
        return None if self.ours is None or self.paper is None else self.as_good_as(self.paper)

    @property
    def goal_today(self):
        """The paper's ratio if its QEMU had taken as much as today's."""
        part = self.baseline.today / self.baseline.paper
        return self.paper * part if self.better == "higher" else self.paper / part

    @property
    def moved(self):
        """Whether today's QEMU leaves less to be gained than the paper's, and that is why the ratio is not reached."""
        baseline = self.baseline
        if baseline is None or baseline.today is None or baseline.today >= baseline.paper * (1 - self.slack):
            return False
        return bool(baseline.instead) or self.as_good_as(self.goal_today)

    @property
    def outcome(self):
        if self.reached is None:
            return Outcome.NOT_COMPARABLE
        if self.check:
            return Outcome.AS_PAPER if self.reached else Outcome.MOVED
        if self.reached:
            return Outcome.REACHED
        if self.moved:
            return Outcome.MOVED
        return Outcome(self.cause.value) if self.cause else Outcome.UNCLASSIFIED

    @property
    def word(self):
        if self.outcome is Outcome.UNCLASSIFIED:
            return "**not reached**"
        return f"**not reached**: {self.outcome.value}" if self.outcome.missed else self.outcome.value

    def close(self, part):
        """Whether ours is within a part of the paper's, so that more rounds may decide."""
        return bool(self.paper) and self.ours is not None and abs(self.ours / self.paper - 1) <= part

    def text(self, value):
        return "-" if value is None else self.form.format(value)

    def texts(self):
        """The paper's, ours, its spread."""
        return [self.text(self.paper), self.text(self.ours), spread_text(self.spread)]


def compared(results, what, paper, one, other, field, better="higher", why="", form=Verdict.form, **more):
    """The paper's ratio beside ours: of a field of the points `one` ÷ `other`."""
    ours, spread = results.ratio(one, other, field), results.ratio_spread(one, other, field)
    return Verdict(what, paper, ours, spread, better, why, form, points=(tuple(one), tuple(other)), **more)


def require_reasons(name, verdicts):
    """Raises `Unclassified` where a goal of an experiment is missed without a class, or a reason is missing."""
    rows = {each.what: each for each in verdicts}
    wrong = []
    for each in verdicts:
        told = f"{name}: {each.what}: the paper {each.text(each.paper)}, here {each.text(each.ours)}"
        if each.outcome is Outcome.UNCLASSIFIED:
            wrong.append(f"{told}: not reached, without a cause (ours, machine or scale)")
        elif (each.outcome.missed or each.outcome is Outcome.MOVED) and not each.why:
            wrong.append(f"{told}: {each.outcome.value}, without a reason")
        elif each.outcome is Outcome.MOVED and not each.check and each.baseline.instead:
            instead = rows.get(each.baseline.instead)
            if instead is None or instead.reached is None:
                wrong.append(f"{told}: baseline moved, and no figure of {each.baseline.instead!r}")
    if wrong:
        raise Unclassified(
            "\n".join(["figures without a class or a reason, which belong into the experiment's module:", *wrong])
        )


def told_of_baselines(verdicts):
    """Markdown on the rows whose baseline moved: what it was and is, and what is compared instead."""
    rows = {each.what: each for each in verdicts}
    lines = []
    for each in verdicts:
        if each.check or each.outcome is not Outcome.MOVED:
            continue
        baseline = each.baseline
        then, now = baseline.form.format(baseline.paper), baseline.form.format(baseline.today)
        least = "at least " if baseline.at_least else ""
        if baseline.instead:
            instead = rows[baseline.instead]
            rest = (
                f"Instead: *{instead.what}*, the paper {instead.text(instead.paper)}, here"
                f" {instead.text(instead.ours)}: {instead.word}."
            )
        else:
            rest = (
                f"With today's QEMU the paper's {each.text(each.paper)} would be {each.text(each.goal_today)}; here it"
                f" is {each.text(each.ours)}."
            )
        lines.append(f"- *{each.what}*: {baseline.measure}, {least}{then} in the paper, {now} today. {rest}")
    return ["The baseline moved:", "", *lines, ""] if lines else []


def counted(verdicts):
    """How many are reached; whose the others are."""
    goals, checks = ([each.outcome for each in verdicts if each.check is check] for check in (False, True))
    missed = [each for each in goals if each.missed]
    parts = [
        f"{goals.count(Outcome.REACHED)} of {len(goals)} reached, {goals.count(Outcome.MOVED)} baseline moved,"
        f" {len(missed)} not reached"
    ]
    by_class = [f"{missed.count(each)} {each.value}" for each in Outcome if each.missed and missed.count(each)]
    if by_class:
        parts[0] += f" ({', '.join(by_class)})"
    if goals.count(Outcome.NOT_COMPARABLE):
        parts[0] += f", {goals.count(Outcome.NOT_COMPARABLE)} not comparable"
    if checks:
        parts.append(
            f"of {len(checks)} checks of QEMU itself {checks.count(Outcome.AS_PAPER)} as in the paper,"
            f" {checks.count(Outcome.MOVED)} baseline moved"
        )
        if checks.count(Outcome.NOT_COMPARABLE):
            parts[1] += f", {checks.count(Outcome.NOT_COMPARABLE)} not comparable"
    return "; ".join(parts) + "."
