"""All layers of a chain committed into its base, in one command."""

import shutil

from isobath_bench import report, rounds, tools

from . import backing_file, directory, generate, measured, programs, settle

CASE = ("commit",)


def run(count, _seconds):
    layers, size = (20, "256M") if tools.QUICK else (500, "4G")
    work = directory("commit")
    generate(work / "chain", "--layers", layers, "--size", size, "--fill", "25%")
    base = backing_file(work / "chain" / "layer-00001.qcow2")

    def measure(_case, name):
        copy = work / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(work / "chain", copy)
        settle()
        active = copy / f"layer-{layers - 1:05}.qcow2"
        sample = measured(programs()[name], "commit", "-q", "-f", "qcow2", "-b", base, active)
        shutil.rmtree(copy)
        return sample

    samples = rounds.by_case(count, [CASE], list(programs()), measure)
    shutil.rmtree(work)
    value = {(name, field): samples.median((*CASE, name), field) for name in programs() for field in ("seconds", "cpu")}
    ratio = report.ratio(value["qemu-img", "seconds"], value["isobath", "seconds"])
    return {
        "samples": samples.raw(),
        "tables": [],
        "goals": [report.limit(f"commit of {layers} layers, {size} disk: qemu-img ÷ isobath", ratio, at_least=20)],
        "figures": [],
        "notes": [
            f"Commit of {layers} layers: isobath {value['isobath', 'seconds']:.2f} s (processor "
            f"{value['isobath', 'cpu']:.2f} s), qemu-img {value['qemu-img', 'seconds']:.2f} s "
            f"({value['qemu-img', 'cpu']:.2f} s)."
        ],
    }
