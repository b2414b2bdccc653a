"""A read of 4 KiB that the page cache has, by the engine alone, in one process and thread; beside the crate imago."""

from ..rounds import Samples, rotated
from . import images, load, paired

ENGINE, IMAGO = "engine", "imago"
CASES = [(ENGINE, 1, 1), (ENGINE, 30, 1), (ENGINE, 1000, 1), (ENGINE, 1, 32), (ENGINE, 30, 32), (ENGINE, 1000, 32), (IMAGO, 1, 1)]


def measure(program, layers, depth, seconds):
    image = images.chain(layers)
    images.warm(image)
    # A read takes about 2 µs.
    return load.isobath_load(program, image, "--qd", depth, "--count", seconds * 500_000)


def run(rounds, seconds):
    samples, peer = Samples(), CASES[-1]
    for number in range(rounds):
        for case in rotated(CASES, number):
            samples.attempt(case, lambda: measure(*case, seconds))
    rows, goals = [], []
    for case in CASES:
        program, layers, depth = case
        rows.append([
            "isobath" if program == ENGINE else program, f"{layers:,}", depth, samples.text(case, "cpu_ns_per_read"),
            paired.text(paired.ratio(samples, case, peer, "cpu_ns_per_read")), samples.text(case, "allocations_per_read", "{:.2f}"),
        ])  # fmt: skip
        if program == ENGINE:
            what = f"engine alone, {layers:,} layer{'s' if layers > 1 else ''}, qd {depth}: CPU of a cached 4 KiB read ÷ imago, 1 layer"
            goals.append(paired.goal(samples, what, case, peer, "cpu_ns_per_read", at_most=0.8))
    table = {
        "title": "The engine alone",
        "text": "4 KiB random reads that the page cache has, user and kernel time; imago waits in each, so it has one at a time.",
        "columns": ["engine", "layers", "queue depth", "CPU ns a read", "÷ imago", "allocations a read"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
