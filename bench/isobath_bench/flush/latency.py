"""4 KiB written to a new cluster and flushed: one client, and several at once."""

import random

from .. import plot, report
from ..rounds import Samples, rotated
from . import contenders, log, mounts
from .contenders import RAW, THIN
from .syncs import CLIENTS, CLUSTER, WARM_UP, length

SYSTEMS = ["ext4", "XFS"]
NUMBERS = [1, CLIENTS]
SLICES = 6


def measure(system, contender, clients, seed):
    """As many flushes in each slice, whatever the number of clients."""
    images = [each.image(system.directory, THIN) for each in (contender, contenders.reference())]
    places = [cluster * CLUSTER for cluster in range(contenders.size() // CLUSTER)]
    random.Random(seed).shuffle(places)
    warm, rest = places[:WARM_UP], places[WARM_UP:]
    slices = [rest[number * length() : (number + 1) * length()] for number in range(SLICES)]
    slices = [[log.write_and_flush(part[client::clients], 4096) for client in range(clients)] for part in slices]
    system.settle()
    with contender.serve(images[0]) as server, contenders.reference().serve(images[1]) as raw:
        for each in (server, raw):
            log.replay(each, log.write_and_flush(warm, 4096))
        before = server.cpu()
        done = log.take_turns(server, raw, slices)
        return {**done, "cpu_us": (server.cpu() - before) / done["flushes"] * 1e6}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody()
    names = list(everybody)
    for kind in SYSTEMS:
        with mounts.mounted(kind, filled=True) as system:
            for number in range(rounds):
                for name in rotated(names, number * 3):
                    for clients in NUMBERS:
                        key = (kind, clients, name)
                        samples.attempt(key, lambda: measure(system, everybody[name], clients, number))

    def middle(kind, clients, name, field):
        return samples.median((kind, clients, name), field)

    rows, goals, bars = [], [], {}
    for kind in SYSTEMS:
        for clients in NUMBERS:
            figures = {name: middle(kind, clients, name, "flushes_per_second") for name in names}
            of_raw = {name: middle(kind, clients, name, "of_raw") for name in names}
            best, best_of_raw = contenders.best_qemu(of_raw)
            for name in names:
                key = (kind, clients, name)
                rows.append(
                    [
                        kind,
                        clients,
                        name,
                        samples.text(key, "flushes_per_second"),
                        samples.text(key, "of_raw", "{:.2f}x"),
                        spread(samples, key, "of_raw"),
                        text_of_ratio(report.ratio(of_raw[name], best_of_raw)),
                        samples.text(key, "cpu_us"),
                    ]
                )
            goal, where = of_raw.get(f"isobath {contenders.GOAL}"), f"{kind}, {clients} client{'s' * (clients > 1)}"
            why = None if goal else f"no mode {contenders.GOAL}"
            if goal and (noise := too_noisy(of_raw)):
                goal, why = None, noise
            goals.append(
                report.limit(f"4 KiB write and flush, {where} ÷ raw, fully written", goal, at_least=0.95, why=why)
            )
            goals.append(
                report.limit(
                    f"4 KiB write and flush, {where} ÷ the best of QEMU ({best})",
                    report.ratio(goal, best_of_raw),
                    at_least=1.3,
                    why=why,
                )
            )
            bars[where] = figures
    table = {
        "title": "4 KiB written to a new cluster and flushed",
        "text": (
            f"{SLICES} slices of {length()} pairs, each client waiting for its flush. Beside each server runs one of a"
            " fully written raw file (by isobath), and both take turns slice by slice: *of raw* is the median of the"
            " slices' ratios; the spread is that of the rounds. QEMU's best is without preallocation=full, which is"
            " not a thin image. The file systems lie on a loop device whose file is fully written."
        ),
        "columns": [
            "file system",
            "clients",
            "server",
            "flushes/s",
            "of raw",
            "spread",
            "of QEMU's best",
            "CPU µs a flush",
        ],
        "rows": rows,
    }
    figure = plot.bars("flush_cost-latency.svg", "4 KiB written to a new cluster and flushed", "flushes a second", bars)
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note(),
    }


def too_noisy(of_raw):
    """Why ratios of time say nothing, if they do not: a raw file beside another gives 1 on a quiet machine."""
    control = of_raw[RAW]
    if control is None or not 0.9 <= control <= 1.1:
        return f"too noisy: raw beside raw gives {text_of_ratio(control)}"
    return None


def text_of_ratio(value):
    return "-" if value is None else f"{value:.2f}x"


def spread(samples, key, field):
    """Half the range, for a table."""
    return "-" if samples.failure(key) else f"±{report.spread(samples[key], field) * 100:.0f} %"
