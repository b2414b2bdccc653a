"""An encrypted image read and written, beside the same image in plain, in a warm page cache.

Isobath by itself with its command `bench`; beside QEMU, whose `bench` takes no secrets, over NBD: `qemu-nbd` and
Isobath under that name, with the same command line.
"""

import shutil
import statistics

from isobath_bench import fio, report, rounds, servers, tools

from . import directory, measured, settle

# Name, bytes of a request, requests in flight, whether they write.
LOADS = {
    "read 4k": (4096, 16, False),
    "write 4k": (4096, 16, True),
    "read 1M": (1 << 20, 4, False),
    "write 1M": (1 << 20, 4, True),
}
IMAGES = ["plain", "encrypted"]
ALONE = ["isobath bench"]
SERVERS = ["isobath over NBD", "qemu-nbd"]


def run(count, length):
    mib = 64 if tools.QUICK else 1024
    work = directory("encryption")
    (work / "key").write_text("correct horse")
    secret = ["--object", f"secret,id=s,file={work / 'key'}"]
    key = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    named = {}
    for name in IMAGES:
        options, with_key = ([*secret, "-o", key], ",encrypt.key-secret=s") if name == "encrypted" else ([], "")
        tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", *options, work / name, f"{mib}M")
        named[name] = f"driver=qcow2,file.filename={work / name}{with_key}"
        tools.run(tools.ISOBATH, "io", *secret, "--image-opts", "-c", f"write -q -P 7 0 {mib}M", named[name])
    (work / "links").mkdir()
    tools.run(tools.ISOBATH, "install-links", work / "links")
    programs = {"isobath over NBD": work / "links" / "qemu-nbd", "qemu-nbd": "qemu-nbd"}
    settle()

    def alone(load, name, _program):
        size, depth, writes = LOADS[load]
        total = mib << 20 if size > 4096 else (mib << 20) // 4
        command = [tools.ISOBATH, "bench", *secret, "--image-opts", "-d", depth, "-s", size]
        command += ["-w"] if writes else []
        # Opening an image derives a key, which the time of one request shows.
        openings = [measured(*command, "-c", 1, named[name])["seconds"] for _ in range(5)]
        seconds = measured(*command, "-c", total // size, named[name])["seconds"] - statistics.median(openings)
        settle()
        if seconds < 0.001:
            raise tools.Failed(f"{load} of {mib} MiB takes no longer than to open the image")
        return {"bytes_per_second": total / seconds}

    def served(load, name, program):
        size, depth, writes = LOADS[load]
        order = "rand" if size == 4096 else ""
        socket = tools.WORK / "encryption.sock"
        command = [programs[program], "--persistent", "--shared=16", "--cache=writeback", "--aio=io_uring"]
        command += [f"--socket={socket}"]
        with servers.Server(program, [*command, *secret, "--image-opts", named[name]], socket) as server:
            sample = fio.load(
                server, rw=order + ("write" if writes else "read"), block=size, depth=depth, seconds=length
            )
        settle()
        return sample

    cases = [(load, name) for load in LOADS for name in IMAGES]
    samples = rounds.by_case(count, cases, ALONE, alone)
    samples.update(rounds.by_case(count, cases, SERVERS, served))
    shutil.rmtree(work)

    def speed(load, name, program):
        return samples.median((load, name, program), "bytes_per_second")

    goals, rows = [], []
    for load in LOADS:
        of_plain = report.ratio(speed(load, "encrypted", ALONE[0]), speed(load, "plain", ALONE[0]))
        of_qemu = report.ratio(*(speed(load, "encrypted", program) for program in SERVERS))
        goals.append(report.limit(f"encrypted, {load}: throughput, encrypted ÷ plain", of_plain, at_least=0.8))
        goals.append(report.limit(f"encrypted, {load}: throughput, isobath ÷ qemu-nbd", of_qemu, at_least=1.3))
        for name in IMAGES:
            for program in ALONE + SERVERS:
                text = samples.text((load, name, program), "bytes_per_second", factor=1 / (1 << 20))
                rows.append([load, name, program, text])
    return {
        "samples": samples.raw(),
        "tables": [{"title": f"{mib} MiB disk", "columns": ["load", "image", "program", "MiB/s"], "rows": rows}],
        "goals": goals,
        "figures": [],
        "notes": [],
    }
