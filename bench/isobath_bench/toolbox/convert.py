"""A chain converted into one image."""

import shutil

from isobath_bench import report, rounds, tools

from . import directory, generate, measured, programs, settle

# QEMU takes minutes for the long one: once is enough.
ROUNDS_OF_QEMU = 1
# Isobath's copy is durable when the command ends; by default QEMU's is not.
DURABLE = ["-t", "writeback"]


def run(count, _seconds):
    layers, size = (50, "128M") if tools.QUICK else (1000, "1G")
    work = directory("convert")
    long = generate(work / "chain", "--layers", layers, "--size", size, "--fill", "90%")
    one = work / "one.qcow2"
    tools.run(tools.ISOBATH, "convert", "-O", "qcow2", long, one)
    images = {1: one, layers: long}
    samples = rounds.Samples()
    for number in range(count):
        for depth, image in images.items():
            for name in rounds.rotated(list(programs()), number):
                if depth > 1 and name == "qemu-img" and number >= ROUNDS_OF_QEMU:
                    continue
                settle()
                target = work / "target"
                samples.attempt(
                    (depth, name), lambda: measured(programs()[name], "convert", *DURABLE, "-O", "qcow2", image, target)
                )
                target.unlink(missing_ok=True)
    shutil.rmtree(work)

    def ratio(depth, field, over, under):
        return report.ratio(samples.median((depth, over), field), samples.median((depth, under), field))

    rows = [
        [depth, name, samples.text((depth, name), "seconds", "{:.2f}"), samples.text((depth, name), "cpu", "{:.2f}")]
        for depth in images
        for name in programs()
    ]
    return {
        "samples": samples.raw(),
        "tables": [
            {"title": f"convert to qcow2, {size}", "columns": ["layers", "program", "s", "processor s"], "rows": rows}
        ],
        "goals": [
            report.limit(
                f"convert of {layers} layers: qemu-img ÷ isobath",
                ratio(layers, "seconds", "qemu-img", "isobath"),
                at_least=50,
            ),
            report.limit(
                "convert of 1 layer: qemu-img ÷ isobath", ratio(1, "seconds", "qemu-img", "isobath"), at_least=1.3
            ),
            report.limit(
                "convert of 1 layer: processor time, isobath ÷ qemu-img",
                ratio(1, "cpu", "isobath", "qemu-img"),
                at_most=0.7,
            ),
        ],
        "figures": [],
        "notes": [],
    }
