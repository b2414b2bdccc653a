"""A fleet of chains like the one that the SVD paper describes, drawn from its figures, and surveyed."""

import bisect
import json
import os
import re
import struct
import time
from random import Random

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Verdict

NAME = "fleet"
TITLE = "A provider's fleet, surveyed"
SOURCE = "SVD, section III, figures 4 and 5"

SEED = 20201231
YEAR, DAY = 366 * 86400, 86400
# The longest chain: its layers, and the seconds between them.
LONGEST, EVERY = 1037, 38 * 3600
# The paper's fleet, in its text on figure 5: of the chains more than 80 % have up to ten files, with nearly half of all
# files, and 10 % have 30 to 35, with 25 % of the files; few have 100 and more. What it does not say is chosen so that
# both come out: parts of the chains, and the lengths that these have, each with its weight.
DRAWN = [
    (0.80, {length: length**2.6 for length in range(1, 11)}),
    (0.08, {length: 1.0 for length in range(11, 30)}),
    (0.10, {length: 1.0 for length in range(30, 36)}),
    (0.02, {length: length**-2.2 for length in range(36, 800)}),
]
# How often a chain gets a layer: seconds between two, and parts of the chains. The paper has no numbers of it in its
# text, but that many are daily or more, and that long chains get theirs in days or weeks.
OFTEN = [(3600, 0.1), (DAY, 0.4), (7 * DAY, 0.3), (30 * DAY, 0.2)]
OFTEN_LONG = [(DAY / 2, 0.3), (DAY, 0.4), (7 * DAY, 0.3)]
SIZE = 50 << 30
# The survey's own charts, by their ids on its page.
CHARTS = {
    "lengths": "Chain length (SVD, figure 5): of chains blue, of files orange",
    "longest": "Longest chain over time (SVD, figure 4)",
    "intervals": "Time between layers",
}
# The colours of the survey's page, as a picture has them by itself.
STYLE = (
    "text{font-family:DejaVu Sans,sans-serif;font-size:11.5px;fill:#5d6878}.line{fill:none;stroke-width:2.2;"
    "stroke-linejoin:round}.line.s0{stroke:#1f6feb}.line.s1{stroke:#d4620a}.bars{fill:#1f6feb;opacity:.85}"
    ".grid{stroke:#dfe3e9}.axis{stroke:#5d6878}.mark{stroke:#b42318;stroke-dasharray:3 3}.marked{fill:#b42318}"
)


def points(profile):
    return [Point((profile.of(200, 4000),), profile.of(5, 60), once=True)]


def lengths(random, chains):
    """A length for each chain, the longest last."""
    found = []
    for _ in range(chains - 1):
        weights = random.choices([each for _, each in DRAWN], [part for part, _ in DRAWN])[0]
        found.append(random.choices(list(weights), weights.values())[0])
    return [*found, LONGEST]


def header(size, backing):
    """A qcow2 image that is nothing but its header: version 3, clusters of 64 KiB. Its tables are where they would be,
    past the file's end."""
    name = backing.encode()
    # The extension that gives the backing file's format, and the one that ends the list.
    extensions = (struct.pack(">II8s", 0xE2792ACA, 5, b"qcow2") if name else b"") + bytes(8)
    at = 104 + len(extensions)
    fields = struct.pack(">4sIQII", b"QFI\xfb", 3, at if name else 0, len(name), 16)
    tables = struct.pack(">QIIQQIIQ", size, 0, -(-size // (512 << 20)), 3 << 16, 1 << 16, 1, 0, 0)
    return fields + tables + struct.pack(">QQQII", 0, 0, 0, 4, 104) + extensions + name


def make(directory, random, chains, now):
    """A fleet of images that were last written when they would have been made; gives the lengths of its chains."""
    drawn = lengths(random, chains)
    for number, length in enumerate(drawn):
        tenant = directory / f"tenant-{number % 97:02}"
        tenant.mkdir(exist_ok=True)
        choice = OFTEN_LONG if length >= 100 else OFTEN
        mean = EVERY if length == LONGEST else random.choices(*zip(*choice))[0]
        # The last layer is from within the last interval, those below are each older than the next.
        made = [now - random.random() * min(mean, DAY)]
        for _ in range(length - 1):
            made.append(made[-1] - (mean if length == LONGEST else random.expovariate(1 / mean)))
        below = ""
        for layer, when in enumerate(reversed(made)):
            path = tenant / f"disk-{number:05}-{layer:04}.qcow2"
            path.write_bytes(header(SIZE, below))
            os.utime(path, (when, when))
            below = path.name
    return drawn


def measure(setting, point, number):
    del setting, number
    (chains,) = point.key
    now = time.time()
    with tools.in_memory("fleet") as directory:
        (directory / "images").mkdir()
        drawn = make(directory / "images", Random(SEED), chains, now)
        page = directory / "survey.html"
        words = ["chain", "survey", directory / "images", "--times", "modified", "--quiet", "--html", page]
        found = json.loads(tools.run(tools.ISOBATH, *words, "--output", "json"))
        html = page.read_text()
    shares = [(each["length"], each["chains"], each["files"]) for each in found["lengths"]["shares"]]
    counted = [length for length, chains, _ in shares for _ in range(chains)]
    return {
        "seed": SEED,
        "files": sum(drawn),
        "counted_otherwise": sum(one != other for one, other in zip(sorted(drawn), counted))
        + abs(len(drawn) - len(counted)),
        "shares": shares,
        "longest": [[round(when - now), length] for when, length in found["longest-over-time"]],
        "merge_at": found["merge-at"],
        "advice": found["advice"],
        "files_merged": found["files-merged"],
        "qemu_memory": found["qemu-memory-bytes"],
        "isobath_memory": found["isobath-memory-bytes"],
        "problems": sum(found["problem-counts"].values()),
        "charts": {name: picture(html, name) for name in CHARTS},
    }


def picture(page, name):
    """A chart of the survey's page as a picture by itself."""
    figure = page.partition(f'<figure id="{name}">')[2].partition("</figure>")[0]
    chart = re.search(r'<svg (viewBox="0 0 (\S+) (\S+)".*?)>(.*?)</svg>', figure, re.S)
    if not chart:
        raise tools.Failed(f"the survey's page has no chart {name}")
    frame, width, height, drawn = chart.groups()
    # What the page's script shows under the pointer.
    drawn = re.sub(r' data-(?:points|name)="[^"]*"', "", drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} width="{width}" height="{height}"><style>{STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{drawn}</svg>\n'
    )


def part(shares, low, high, of):
    """The part of the chains (1) or files (2) whose chains have `low` to `high` files."""
    return sum(each[of] for each in shares if low <= each[0] <= high) / sum(each[of] for each in shares)


def section(results):
    parts, verdicts = [], []
    for key in results.keys():
        for sample in results.samples(key):
            shares = sample["shares"]
            for name, title in CHARTS.items():
                file = figures.saved(results, f"fleet-{name}", title).file
                (figures.DIRECTORY / f"{file}.svg").write_text(sample["charts"][name])
                parts.append(f"**{title}**\n\n![{title}]({figures.DIRECTORY.name}/{file}.svg)")
            rows = [
                [
                    f"{low:,} to {high:,}" if low < high else f"{low:,}",
                    *(f"{part(shares, low, high, of):.1%}" for of in (1, 2)),
                ]
                for low, high in ((1, 1), (2, 5), (6, 10), (11, 29), (30, 35), (36, 99), (100, 2000))
            ]
            parts.append(Table("Chains by length.", ["files in a chain", "of chains", "of files"], rows))
            advice = ", ".join(f"{word} {count:,}" for word, count in sample["advice"].items())
            parts.append(
                f"The survey advises for a limit of {sample['merge_at']}: {advice}. Merging removes"
                f" {sample['files_merged']:,} of {sample['files']:,} files. By the survey's model all chains take at"
                f" most {sample['qemu_memory'] / 2**30:,.1f} GiB of memory with QEMU,"
                f" {sample['isobath_memory'] / 2**30:,.1f} GiB with Isobath, if every disk is read whole."
            )
            # The longest chain a year ago, when the year's first measurement was made.
            steps = sample["longest"]
            at = bisect.bisect_right([when for when, _ in steps], -YEAR) - 1
            for what, paper, ours, better, form in (
                ("chains that are counted otherwise than drawn", 0, sample["counted_otherwise"], "equal", "{:,.0f}"),
                ("chains of up to 10 files, of all chains", 0.8, part(shares, 1, 10, 1), "equal", "{:.2f}"),
                ("their files, of all files", 0.5, part(shares, 1, 10, 2), "equal", "{:.2f}"),
                ("chains of 30 to 35 files, of all chains", 0.1, part(shares, 30, 35, 1), "equal", "{:.2f}"),
                ("their files, of all files", 0.25, part(shares, 30, 35, 2), "equal", "{:.2f}"),
                ("the longest chain, a year before", 800, steps[at][1] if at >= 0 else None, "higher", "{:,.0f}"),
                ("the longest chain, in the end", 1000, steps[-1][1], "higher", "{:,.0f}"),
            ):
                said = what if what != "their files, of all files" else f"{verdicts[-1].what.split(',')[0]}: {what}"
                verdicts.append(Verdict(said, paper, float(ours), None, better, WHY, form))
    return Section(
        paper=(
            "The authors measured the lengths of all chains of a provider's region each day of a year, of hundreds of"
            " thousands of chains: most are short, those of 30 to 35 files are many, since chains are merged from"
            " there on, and there was always one of more than 800 files, at last of more than 1,000."
        ),
        ours=(
            "`isobath chain survey` measures the same of any directory. Its fleet here is drawn from what the paper's"
            " text says of the figures, not from the provider's data, which are not published; so the lines below show"
            " that the survey finds what was drawn, and what it makes of such a fleet. The lengths in between, and the"
            " times between layers, are assumptions. The images have headers and nothing else, and are dated by their"
            " last write; the pictures are the survey's."
        ),
        parts=parts,
        verdicts=verdicts,
    )


# Why a line may be missed.
WHY = ""
