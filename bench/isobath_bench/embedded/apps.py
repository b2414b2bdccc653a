"""Applications on a new disk: what ext4 on it is sent under Postmark and under a build, recorded once, replayed."""

import json
import random
import shutil

from .. import plot, report, tools
from ..flush import log, mounts, traces
from ..flush.latency import spread, text_of_ratio
from ..rounds import Samples, rotated
from . import contenders, loads, places
from .contenders import GOAL

PLACES = ["hdd", "ssd", "ext4"]
SIZE = 1 << 30
MAKE = mounts.KINDS["ext4"][0]


def scale(count):
    return count // 20 if tools.QUICK else count


def sync(directory):
    tools.run("sync", "--file-system", directory)


def name_of(directory, number):
    return directory / f"s{number % 10}" / f"{number}"


def fill(choice, path, mode="wb"):
    with open(path, mode) as file:
        file.write(choice.randbytes(choice.randint(500, 9_770)))


def postmark(directory):
    """As Postmark, a tenth of the files and transactions of its paper's run: files of 500 B to 9.77 KB made in
    ten directories; read or appended to, and made or deleted; all deleted. The file system is synced after each phase
    and tenth of the transactions, where the page cache of a guest with little memory would be written back."""
    choice = random.Random(1)
    for number in range(10):
        (directory / f"s{number}").mkdir()
    alive = list(range(scale(10_000)))
    for number in alive:
        fill(choice, name_of(directory, number))
    sync(directory)
    made = len(alive)
    for number in range(scale(25_000)):
        if number % 2_500 == 2_499:
            sync(directory)
        path = name_of(directory, choice.choice(alive))
        if choice.random() < 0.5:
            path.read_bytes()
        else:
            fill(choice, path, "ab")
        if choice.random() < 0.5 or len(alive) < 2:
            fill(choice, name_of(directory, made))
            alive.append(made)
            made += 1
        else:
            place = choice.randrange(len(alive))
            alive[place], alive[-1] = alive[-1], alive[place]
            name_of(directory, alive.pop()).unlink()
    sync(directory)
    for number in alive:
        name_of(directory, number).unlink()


def build(directory):
    """As a build of a kernel: a tarball of 77 MB copied and unpacked into small files, an object file of each
    fourth of them, and a few large ones linked of these."""
    choice = random.Random(2)
    tarball = directory / "source.tar.xz"
    with open(tarball, "wb") as file:
        for _ in range(scale(77)):
            file.write(choice.randbytes(1_000_000))
    sync(directory)
    objects = 0
    for number in range(scale(12_000)):
        place = directory / f"d{number % 200}"
        place.mkdir(exist_ok=True)
        size = int(choice.lognormvariate(9, 1))
        (place / f"{number}.c").write_bytes(choice.randbytes(size))
        if number % 4 == 0:
            (place / f"{number}.o").write_bytes(choice.randbytes(size * 3))
            objects += size * 3
    for number in range(4):
        with open(directory / f"vmlinux-{number}", "wb") as file:
            for _ in range(objects >> 20):
                file.write(choice.randbytes(1 << 20))


APPLICATIONS = {"postmark": postmark, "build": build}
# A recording has places, not bytes.
DATA = {"compressible": loads.COMPRESSIBLE, "incompressible": loads.INCOMPRESSIBLE}


def recorded(name):
    """The new file system (a raw file), and the requests that the application became; kept for later runs."""
    directory = tools.WORK / f"embedded-trace-{name}{'-quick' * tools.QUICK}"
    disk, trace, done = directory / "disk.raw", directory / "trace", directory / "done"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        tools.run("truncate", f"--size={SIZE}", disk)
        with mounts.attached(disk, make=MAKE):
            pass
        copy = directory / "recording.raw"
        shutil.copyfile(disk, copy)
        with mounts.attached(copy) as (device, mount):
            steps = traces.record(device, lambda: (APPLICATIONS[name](mount), sync(mount)))
        copy.unlink()
        trace.write_text(
            log.HEADER + "".join(f"nbd {what} {offset} {length}\n" for what, offset, length in steps) + "nbd close\n"
        )
        done.touch()
    return disk, trace


def steps_of(trace):
    """Writes, bytes of these, flushes of a recording."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    writes = [int(line[3]) for line in lines if line[1:2] == ["write"]]
    return len(writes), sum(writes), sum(line[1:2] == ["sync"] for line in lines)


def measure(place, contender, disk, trace, data):
    """The whole recording, request by request."""
    with contender.fresh(place, SIZE, content=disk) as (server, _):
        before = server.cpu()
        out = tools.run(
            "fio",
            "--name=replay",
            "--output-format=json",
            "--ioengine=nbd",
            f"--uri={server.uri}",
            f"--read_iolog={trace}",
            *data,
        )
        cpu = server.cpu() - before
    job = json.loads(out[out.index("{") :])["jobs"][0]
    writes, _, flushes = steps_of(trace)
    done = [job["write"]["total_ios"], job["sync"].get("total_ios", 0)]
    if job["error"] or done != [writes, flushes]:
        raise tools.Failed(f"{contender.name}: {done} writes and flushes were done, of {[writes, flushes]}")
    # Without fio's own start.
    waited = sum(
        job[side]["lat_ns"]["mean"] * job[side]["total_ios"] for side in ("write", "sync") if job[side].get("total_ios")
    )
    return {"seconds": waited / 1e9, "cpu": cpu}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    everybody = contenders.everybody()
    names = list(everybody)
    found = {application: recorded(application) for application in APPLICATIONS}
    cases = [(application, data) for application in APPLICATIONS for data in DATA]
    for where in PLACES:
        with places.place(where) as place:
            for number in range(rounds):
                for name in rotated(names, number):
                    for application, data in cases:
                        samples.attempt(
                            (where, application, data, name),
                            lambda: measure(place, everybody[name], *found[application], DATA[data]),
                        )
    rows, goals, bars = [], [], {}
    default = contenders.qemu_names()[0]
    for where in PLACES:
        for case in cases:
            own = samples.median((where, *case, GOAL), "seconds")
            for name in names:
                key = (where, *case, name)
                value = report.ratio(samples.median(key, "seconds"), own)
                rows.append(
                    [
                        where,
                        *case,
                        name,
                        samples.text(key, "seconds", "{:.2f}"),
                        spread(samples, key, "seconds"),
                        text_of_ratio(value),
                        samples.text(key, "cpu", "{:.2f}"),
                    ]
                )
            bars[f"{case[0]}, {case[1]}, {where}"] = {
                name: samples.median((where, *case, name), "seconds") for name in names
            }
            value = report.ratio(samples.median((where, *case, default), "seconds"), own)
            goals.append(
                report.limit(
                    f"{case[0]}, {case[1]}, {where}: {default}'s time ÷ embedded's",
                    value,
                    at_least=1.0,
                    why="no mode embedded",
                )
            )
    about = "; ".join(
        f"{name}: {(told := steps_of(trace))[0]:,} writes of {told[1] >> 20:,} MiB, {told[2]:,} flushes"
        for name, (_, trace) in found.items()
    )
    table = {
        "title": "Applications",
        "text": (
            "What a new ext4 on the disk is sent, recorded on a loop device and replayed one after another, on an image"
            " of the new file system, with data of one sort. " + about + "."
        ),
        "columns": ["disk", "application", "data", "server", "s", "spread", "its time ÷ embedded's", "CPU s"],
        "rows": rows,
    }
    figure = plot.bars("embedded-apps.svg", "Applications", "s", bars)
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if sample.get("failed")]
    return {
        "samples": samples.raw(),
        "tables": [table],
        "goals": goals,
        "figures": [figure],
        "notes": contenders.missing_note() + notes,
    }
