"""Pages: what was measured beside what the paper reports, as Markdown."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from isobath_bench import tools

from . import BEYOND, PAPERS, figures, plan, record
from .stats import Results
from .verdict import Unclassified, counted, require_reasons, told_of_baselines

# Where the figures are, beside the pages.
FIGURES = "figures"
HEAD = "<!-- Made by `bench/papers` from raw results: do not edit. -->"


@dataclass(frozen=True)
class Table:
    """Columns, and rows of texts."""

    title: str
    columns: list
    rows: list
    text: str = ""


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


def verdicts_of(experiment, profile, records):
    """The verdicts on what is on record of an experiment; its figures are not kept."""
    with tempfile.TemporaryDirectory() as drawn:
        figures.DIRECTORY = Path(drawn)
        return experiment.module.section(results_of(experiment, profile, records)).verdicts


def write(directory, papers, profile, records_of, machine):
    """Writes a page for each of some papers, and the index. `records_of(experiment)` gives what is on record,
    `machine(experiment)` what that was made on, of the papers' experiments all the same.

    Raises `Unclassified`, and changes no page, if a goal is missed without a class or a reason."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".figures-") as drawn:
        figures.DIRECTORY = Path(drawn) / FIGURES
        figures.DIRECTORY.mkdir()
        pages = texts(papers, profile, records_of, machine)
        shutil.rmtree(directory / FIGURES, ignore_errors=True)
        figures.DIRECTORY.rename(directory / FIGURES)
    for name, text in pages.items():
        (directory / f"{name}.md").write_text(text)


def texts(papers, profile, records_of, machine):
    """The pages' texts by name; draws their figures."""
    about = about_text(machine(None)) if machine(None) else ""
    pages, index, everything, wrong = {}, [], [], []
    for name in papers:
        package = plan.paper(name)
        beyond = name in BEYOND
        lines, sections = [HEAD, f"# {package.TITLE}", "", package.ABOUT.strip(), ""], []
        lines += [] if beyond else [about, ""]
        for module in package.EXPERIMENTS:
            experiment = plan.Experiment(name, module)
            records = records_of(experiment)
            if not records:
                continue
            results = results_of(experiment, profile, records)
            section = module.section(results)
            try:
                # A quick run's figures mean nothing.
                if not profile.quick:
                    require_reasons(experiment.name, section.verdicts)
            except Unclassified as error:
                wrong.append(str(error))
                continue
            sections.append((module, section))
            lines += text_of(module, section, results, about_text(machine(experiment)) if beyond else "")
        goal = "goal" if beyond else "paper"
        summary = [f"| figure | what | better is | {goal} | here | spread | verdict |", "|---|---|---|---|---|---|---|"]
        for module, section in sections:
            summary += [f"| {module.SOURCE} | {' | '.join(cells(verdict))} |" for verdict in section.verdicts]
        if sections:
            pages[name] = "\n".join(lines) + "\n"
            verdicts = [verdict for _, section in sections for verdict in section.verdicts]
            everything += [] if beyond else verdicts
            index += ["", f"## [{package.TITLE}]({name}.md)", "", counted(verdicts), "", *summary]
    if wrong:
        raise Unclassified("\n".join(wrong))
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
        (
            "What is *not reached* has a class: *ours*, where Isobath is slower than it could be or is wanted so;"
            " *machine*, where the processors, the emulated guest or the host's file system decide; *scale*, where"
            " smaller sizes, shorter times or other loads than the paper's do. *Baseline moved*: today's QEMU takes"
            " less of the same work than the paper's did, each ÷ the raw disk of its machine, so that less is left to"
            " be gained. The pages have both figures, and compare Isobath with the paper's prototype instead, each ÷"
            " raw, where there is a raw disk to compare with. Lines that compare today's QEMU itself with the paper's"
            " are checks, nobody's goals: *as in the paper* or *baseline moved*."
        ),
        "",
        f"Of the papers' figures in all {counted(everything)}",
        "",
        about,
        *index,
    ]
    pages["README"] = "\n".join(text) + "\n"
    return pages


def cells(verdict):
    return [verdict.what, verdict.better, *verdict.texts(), verdict.word]


def text_of(module, section, results, about=""):
    """A section in Markdown; `about` is what it was made on, where that is not said for the whole page."""
    asked, goal = ("The question", "goal") if results.paper in BEYOND else ("The paper", "paper")
    lines = [
        "",
        f"## {module.TITLE}",
        "",
        f"*{module.SOURCE}.*",
        "",
        f"**{asked}:** {section.paper}",
        "",
        f"**Here:** {section.ours}",
        "",
        *([about, ""] if about else []),
    ]
    for part in section.parts:
        if isinstance(part, Table):
            lines += [f"**{part.title}**" + (f" {part.text}" if part.text else ""), ""]
            lines += ["| " + " | ".join(part.columns) + " |", "|---" * len(part.columns) + "|"]
            lines += ["| " + " | ".join(map(str, row)) + " |" for row in part.rows] + [""]
        elif isinstance(part, figures.Figure):
            at = f"{FIGURES}/{part.file}"
            lines += [f"![{part.title}]({at}.svg)", "", f"([PNG]({at}.png))", ""]
        elif part:
            lines += [str(part), ""]
    if section.verdicts:
        lines += [f"| ratio | better is | {goal} | here | spread | verdict | why |", "|---|---|---|---|---|---|---|"]
        # Where the paper is not reached, or there is nothing to compare, it has to be said why.
        lines += [
            f"| {' | '.join(cells(each))} | {each.why if each.reached is not True else ''} |"
            for each in section.verdicts
        ] + [""]
        lines += told_of_baselines(section.verdicts)
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
    if machine["discarded"]:
        text += f" Thrown away, and measured again, since the machine was busy: {machine['discarded']}."
    if machine["profile"] == "quick":
        text = "**A quick run, to try everything out: its figures mean nothing.** " + text
    return text


def from_directory(raw, directory):
    """Makes the pages of the records in a directory."""
    measured = {path.name.split(".")[0] for path in raw.glob("*.jsonl")}
    machines = {}
    for experiment in [None, *plan.experiments([name for name in BEYOND if name in measured])]:
        path = record.machine_of(raw, experiment)
        if path.exists():
            machines[experiment and experiment.name] = machine = json.loads(path.read_text())
            files = sorted(raw.glob(f"{experiment.name if experiment else '*'}.jsonl"))
            if experiment is None:
                files = [each for each in files if each.name.split(".")[0] in PAPERS]
            machine["rounds"] = 1 + max((each["round"] for path in files for each in record.last(path)), default=0)
            machine["discarded"] = sum(len(record.discarded(path)) for path in files)

    if not machines:
        raise tools.Failed(f"{raw} has no machine.json: nothing was measured")

    def records_of(experiment):
        return record.last(raw / f"{experiment.name}.jsonl")

    def machine_of(experiment):
        return machines.get(experiment and experiment.name)

    profile = next(plan.Profile(each["profile"] == "quick", each["rounds"]) for each in machines.values())
    write(directory, [name for name in PAPERS + BEYOND if name in measured], profile, records_of, machine_of)
