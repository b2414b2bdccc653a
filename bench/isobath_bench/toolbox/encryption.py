"""An encrypted image read and written, beside the same image in plain, in a warm page cache."""

import shutil

from isobath_bench import report, rounds, tools

from . import directory, measured, programs, settle

# Name, bytes of a request, requests in flight, further options.
LOADS = {
    "read 4k": (4096, 16, []),
    "write 4k": (4096, 16, ["-w"]),
    "read 1M": (1 << 20, 4, []),
    "write 1M": (1 << 20, 4, ["-w"]),
}


def run(count, _seconds):
    mib = 64 if tools.QUICK else 1024
    work = directory("encryption")
    (work / "key").write_text("correct horse")
    secret = ["--object", f"secret,id=s,file={work / 'key'}"]
    key = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    images = {"plain": work / "plain", "encrypted": work / "encrypted"}
    for name, image in images.items():
        options = [*secret, "-o", key] if name == "encrypted" else []
        tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", *options, image, f"{mib}M")
    named = {
        name: f"driver=qcow2,file.filename={image}" + (",encrypt.key-secret=s" if name == "encrypted" else "")
        for name, image in images.items()
    }
    for name in images:
        tools.run(tools.ISOBATH, "io", *secret, "--image-opts", "-c", f"write -q -P 7 0 {mib}M", named[name])
    settle()

    def measure(load, name, program):
        size, depth, options = LOADS[load]
        total = mib << 20 if size > 4096 else (mib << 20) // 4
        # Opening an image derives a key, which the time of one request shows.
        command = [programs()[program], "bench", *secret, "--image-opts", "-d", depth, "-s", size, *options]
        alone = measured(*command, "-c", 1, named[name])
        sample = measured(*command, "-c", total // size, named[name])
        settle()
        return {field: sample[field] - alone[field] for field in sample}

    cases = [(load, name) for load in LOADS for name in images]
    samples = rounds.by_case(count, cases, list(programs()), measure)
    shutil.rmtree(work)

    def seconds(load, name, program):
        return samples.median((load, name, program), "seconds")

    goals, rows = [], []
    for load in LOADS:
        of_plain = report.ratio(seconds(load, "plain", "isobath"), seconds(load, "encrypted", "isobath"))
        of_qemu = report.ratio(seconds(load, "encrypted", "qemu-img"), seconds(load, "encrypted", "isobath"))
        goals.append(report.limit(f"encrypted, {load}: throughput, encrypted ÷ plain", of_plain, at_least=0.8))
        goals.append(report.limit(f"encrypted, {load}: throughput, isobath ÷ qemu-img", of_qemu, at_least=1.3))
        for name in images:
            for program in programs():
                rows.append([load, name, program, f"{seconds(load, name, program):.3f}"])
    return {
        "samples": samples.raw(),
        "tables": [{"title": f"{mib} MiB disk", "columns": ["load", "image", "program", "s"], "rows": rows}],
        "goals": goals,
        "figures": [],
        "notes": [],
    }
