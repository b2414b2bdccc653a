"""Pages: what was measured beside what the paper reports, as Markdown."""

import json
import os
import shutil
from dataclasses import dataclass, field

from . import PAPERS, figures, plan, record
from .stats import Results, spread_text

HEAD = "<!-- Made by `bench/papers` from raw results: do not edit. -->"


@dataclass(frozen=True)
class Table:
    """Columns, and rows of texts."""

    title: str
    columns: list
    rows: list
    text: str = ""


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

    @property
    def reached(self):
        """Whether ours is as good as the paper's, to 3 % or the spread of ours; `None` if there is no telling."""
        if self.ours is None or self.paper is None:
            return None
        slack = max(0.03, min(self.spread or 0, 0.2))
        if self.better == "equal":
            return abs(self.ours / self.paper - 1) <= max(0.1, slack) if self.paper else abs(self.ours) < 0.005
        if self.better == "higher":
            return self.ours >= self.paper * (1 - slack)
        return self.ours <= self.paper * (1 + slack)

    @property
    def word(self):
        return {True: "reached", False: "**not reached**", None: "not comparable"}[self.reached]

    def texts(self):
        """The paper's, ours, its spread."""

        def text(value):
            return "-" if value is None else self.form.format(value)

        return [text(self.paper), text(self.ours), spread_text(self.spread)]


def compared(results, what, paper, one, other, field, better="higher", why="", form=Verdict.form):
    """The paper's ratio beside ours: of a field of the points `one` ÷ `other`."""
    ours, spread = results.ratio(one, other, field), results.ratio_spread(one, other, field)
    return Verdict(what, paper, ours, spread, better, why, form)


@dataclass(frozen=True)
class Section:
    """What a page says of an experiment."""

    # What the authors did and found.
    paper: str
    # What is done here, and at which scale.
    ours: str
    # Figures, tables and texts, in order.
    parts: list = field(default_factory=list)
    verdicts: list = field(default_factory=list)


def results_of(experiment, profile, records):
    return Results(experiment.paper, experiment.module.NAME, profile, records)


def write(directory, papers, profile, records_of, machine):
    """Writes a page for each of some papers, and the index. `records_of(experiment)` gives what is on record."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / "figures", ignore_errors=True)
    figures.DIRECTORY = directory / "figures"
    figures.DIRECTORY.mkdir()
    about = about_text(machine)
    index = []
    for name in papers:
        package = plan.paper(name)
        lines, sections = [HEAD, f"# {package.TITLE}", "", package.ABOUT.strip(), "", about, ""], []
        for module in package.EXPERIMENTS:
            experiment = plan.Experiment(name, module)
            records = records_of(experiment)
            if not records:
                continue
            results = results_of(experiment, profile, records)
            section = module.section(results)
            sections.append((module, section))
            lines += text_of(module, section, results, directory)
        summary = ["| figure | what | better is | paper | here | spread | verdict |", "|---|---|---|---|---|---|---|"]
        for module, section in sections:
            summary += [f"| {module.SOURCE} | {' | '.join(cells(verdict))} |" for verdict in section.verdicts]
        if sections:
            (directory / f"{name}.md").write_text("\n".join(lines) + "\n")
            verdicts = [verdict for _, section in sections for verdict in section.verdicts]
            index += ["", f"## [{package.TITLE}]({name}.md)", "", counted(verdicts), "", *summary]
    text = [
        HEAD,
        "# The papers' figures, measured again",
        "",
        (
            "`make papers` runs every experiment of five papers on disk images with Isobath and QEMU side by side and"
            " makes these pages; `make papers-quick` tries all of it out in less than a quarter of an hour. Each line"
            " compares a ratio that a paper reports with the same ratio here: the paper's prototype ÷ its QEMU, Isobath"
            " ÷ today's QEMU. It is *reached* if ours is at least as good, to 3 % or to the spread of ours. The pages"
            " say what was scaled, and why a ratio differs."
        ),
        "",
        about,
        *index,
    ]
    (directory / "README.md").write_text("\n".join(text) + "\n")


def counted(verdicts):
    """How many are reached."""
    reached = [verdict.reached for verdict in verdicts]
    text = f"{reached.count(True)} of {len(reached)} reached, {reached.count(False)} not"
    return text + (f", {reached.count(None)} not comparable." if None in reached else ".")


def cells(verdict):
    return [verdict.what, verdict.better, *verdict.texts(), verdict.word]


def text_of(module, section, results, directory):
    """A section in Markdown."""
    lines = [
        "",
        f"## {module.TITLE}",
        "",
        f"*{module.SOURCE}.*",
        "",
        f"**The paper:** {section.paper}",
        "",
        f"**Here:** {section.ours}",
        "",
    ]
    for part in section.parts:
        if isinstance(part, Table):
            lines += [f"**{part.title}**" + (f" {part.text}" if part.text else ""), ""]
            lines += ["| " + " | ".join(part.columns) + " |", "|---" * len(part.columns) + "|"]
            lines += ["| " + " | ".join(map(str, row)) + " |" for row in part.rows] + [""]
        elif isinstance(part, figures.Figure):
            at = os.path.relpath(figures.DIRECTORY / part.file, directory)
            lines += [f"![{part.title}]({at}.svg)", "", f"([PNG]({at}.png))", ""]
        elif part:
            lines += [str(part), ""]
    if section.verdicts:
        lines += ["| ratio | better is | paper | here | spread | verdict | why |", "|---|---|---|---|---|---|---|"]
        # Where the paper is not reached, or there is nothing to compare, it has to be said why.
        lines += [
            f"| {' | '.join(cells(each))} | {each.why if each.reached is not True else ''} |"
            for each in section.verdicts
        ] + [""]
    failures = results.failures()
    if failures:
        lines += ["Failed:", "", *(f"- {' '.join(text.split())[:400]}" for text in failures), ""]
    return lines


def about_text(machine):
    """What it was measured on and with."""
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, Linux {machine['kernel']};"
        f" {machine['isobath']} at {machine['commit']}; {machine['qemu']}; {machine['fio']}. Measured"
        f" {machine['began']}, {machine['rounds']} interleaved round{'s' * (machine['rounds'] > 1)} at most; figures"
        " are medians, *spread* is half the range ÷ the median."
    )
    if machine["profile"] == "quick":
        text = "**A quick run, to try everything out: its figures mean nothing.** " + text
    return text


def from_directory(raw, directory):
    """Makes the pages of the records in a directory."""
    machine = json.loads((raw / "machine.json").read_text())
    profile = plan.Profile(machine["profile"] == "quick", machine["rounds"])

    def records_of(experiment):
        return record.last(raw / f"{experiment.name}.jsonl")

    machine["rounds"] = 1 + max(
        (each["round"] for path in raw.glob("*.jsonl") for each in record.read(path)), default=0
    )
    measured = {path.name.split(".")[0] for path in raw.glob("*.jsonl")}
    write(directory, [name for name in PAPERS if name in measured], profile, records_of, machine)
