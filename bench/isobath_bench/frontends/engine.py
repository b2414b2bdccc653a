"""A read of 4 KiB that the page cache has, by the engine alone, in one process and thread; beside the crate imago and
a raw file."""

from ..rounds import Samples, rotated
from . import images, load, paired

# The commands of `isobath-load`.
ENGINE, IMAGO, RAW = "engine", "imago", "raw"
NAMES = {ENGINE: "isobath", IMAGO: "imago", RAW: "raw file, io_uring"}
CASES = [(ENGINE, layers, depth) for depth in (1, 32) for layers in (1, 30, 1000)] + [
    (IMAGO, 1, 1),
    (RAW, 1, 1),
    (RAW, 1, 32),
]


def measure(program, layers, depth, seconds):
    if program == RAW:
        images.warm(images.raw())
        done = load.isobath_load(program, images.raw(), "--qd", depth, "--seconds", seconds)
        return {"cpu_ns_per_read": done["cpu_us_per_request"] * 1000, "allocations_per_read": None}
    image = images.chain(layers)
    images.warm(image)
    # A read takes about 2 µs.
    return load.isobath_load(program, image, "--qd", depth, "--count", seconds * 500_000)


def run(rounds, seconds):
    samples, peer = Samples(), (IMAGO, 1, 1)
    for number in range(rounds):
        for case in rotated(CASES, number):
            samples.attempt(case, lambda: measure(*case, seconds))
    rows, goals = [], []
    for case in CASES:
        program, layers, depth = case
        rows.append(
            [
                NAMES[program],
                "" if program == RAW else f"{layers:,}",
                depth,
                samples.text(case, "cpu_ns_per_read"),
                paired.text(paired.ratio(samples, case, peer, "cpu_ns_per_read")),
                samples.text(case, "allocations_per_read", "{:.2f}"),
            ]
        )
        if program == ENGINE:
            what = (
                f"engine alone, {layers:,} layer{'s' if layers > 1 else ''}, qd {depth}: CPU of a cached 4 KiB read ÷"
                " imago, 1 layer"
            )
            goals.append(paired.goal(samples, what, case, peer, "cpu_ns_per_read", at_most=0.8))
    table = {
        "title": "The engine alone",
        "text": (
            "4 KiB random reads that the page cache has, user and kernel time. Isobath reads through mappings, as its"
            " servers do; imago waits in each read, so it has one at a time."
        ),
        "columns": ["engine", "layers", "queue depth", "CPU ns a read", "÷ imago", "allocations a read"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
