"""The disk as a block device, by ublk: fio on it in a guest, beside the kernel's loop device on the raw bytes.

The guest has one processor, which executes an instruction in each nanosecond of its time: what is measured are the
instructions of all that takes part, fio's and the kernel's too, whatever this machine is and does besides. A copy
counts as an instruction for each eight bytes, so that nothing is said of large requests.
"""

import json
import shutil

from .. import report, tools
from ..depth import chains

LAYERS = (1, 1000)
# The disk, its chains and its raw bytes must fit the guest's page cache.
SIZE = 64 << 20
LOOP = "raw file, loop device"


def staged():
    """A directory with the files that the guest gets, the raw file's name and the images' by their layers."""
    directory = tools.WORK / "ublk"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    images = {}
    for layers in LAYERS:
        active = chains.make(layers, size=SIZE, fill="100%")
        shutil.copytree(active.parent, directory / str(layers))
        images[layers] = f"{layers}/{active.name}"
    tools.run("qemu-img", "convert", "-O", "raw", directory / images[1], directory / "raw")
    return directory, "raw", images


def measure():
    """Instructions by name and load."""
    directory, raw, images = staged()
    # Without what only a debugger needs: the guest unpacks it.
    program = tools.WORK / "ublk-program" / "isobath"
    program.parent.mkdir(exist_ok=True)
    tools.run("strip", "-o", program, tools.ISOBATH)
    command = ["cargo", "run", "--quiet", "--release", "--package=isobath-testkit", "--example=ublk", "--"]
    try:
        found = json.loads(tools.run(*command, program, directory, raw, *images.values(), cwd=tools.ROOT))
    finally:
        shutil.rmtree(directory)
    return {LOOP: found[raw]} | {layers: found[image] for layers, image in images.items()}


def run(rounds, seconds):
    # Every run counts the same, but for a few interrupts.
    del rounds, seconds
    found = measure()
    rows, goals = [], []
    for load, loop in found[LOOP].items():
        for name, loads in found.items():
            own = loads[load]
            server = [LOOP, ""] if name == LOOP else ["isobath", f"{name:,}"]
            rows.append([load, *server, f"{own:,.0f}", f"{loop / own:.2f}x"])
            if name != LOOP and "qd 32" in load:
                what = (
                    f"ublk, {load}, {name:,} layer{'s' * (name > 1)}: requests for as many instructions ÷ loop device"
                )
                goals.append(report.limit(what, loop / own, at_least=0.9))
    table = {
        "title": "ublk",
        "text": "Instructions of the whole machine for each request, of a guest with one processor; fio opens the"
        " device with O_DIRECT, the files are in the page cache.",
        "columns": ["load", "server", "layers", "instructions", "requests ÷ loop device"],
        "rows": rows,
    }
    return {"samples": found, "tables": [table], "goals": goals, "figures": [], "notes": []}
