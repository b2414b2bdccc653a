"""Internal snapshots of a full disk: taken and applied, with no data copied."""

import shutil

from isobath_bench import report, rounds, tools

from . import directory, measured, programs, settle


def run(count, _seconds):
    size = "1G" if tools.QUICK else "100G"
    work = directory("snapshots")
    image = work / "disk.qcow2"
    # All tables and refcounts of a full disk; its data takes no space.
    tools.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", image, size)
    samples = rounds.Samples()
    for number in range(count):
        for name in rounds.rotated(list(programs()), number):
            for option in ("-c", "-a", "-d"):
                settle()
                samples.attempt((option, name), lambda: measured(programs()[name], "snapshot", option, "one", image))
    checked = tools.run("qemu-img", "check", image)
    shutil.rmtree(work)
    if "No errors" not in checked:
        raise tools.Failed(checked)

    def limit(option, what):
        ratio = report.ratio(
            samples.median((option, "isobath"), "seconds"), samples.median((option, "qemu-img"), "seconds")
        )
        return report.limit(f"snapshot {option}, {what}, {size}: isobath ÷ qemu-img", ratio, at_most=1.0)

    rows = [
        [option, name, samples.text((option, name), "seconds", "{:.3f}"), samples.text((option, name), "cpu", "{:.3f}")]
        for option in ("-c", "-a", "-d")
        for name in programs()
    ]
    return {
        "samples": samples.raw(),
        "tables": [{"title": f"snapshots of {size}", "columns": ["", "program", "s", "processor s"], "rows": rows}],
        "goals": [limit("-c", "create"), limit("-a", "apply")],
        "figures": [],
        "notes": [],
    }
