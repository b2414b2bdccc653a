"""A guest that boots from the chain: through isobath's NBD server, and with QEMU opening the chain."""

import json
import os
import shutil
from functools import cache

from .. import plot, servers, tools
from ..rounds import Samples, rotated
from . import chains

DEPTHS = [1, 50, 500, 1000]


@cache
def program():
    """The example `boot` of the test support, built."""
    command = ["cargo", "build", "--quiet", "--release", "--package=isobath-testkit", "--example=boot"]
    tools.run(*command, cwd=tools.ROOT)
    return tools.TARGET / "release" / "examples" / "boot"


def example(*arguments, qemu=""):
    """Runs it."""
    environment = os.environ | {"RUST_BACKTRACE": "0"} | ({"ISOBATH_QEMU_DIR": qemu} if qemu else {})
    try:
        return tools.run(program(), *arguments, cwd=tools.ROOT, env=environment)
    except tools.Failed as error:
        if "SIGSEGV" in str(error):
            raise servers.Crashed(str(error)) from error
        raise


def make(layers, mib=160):
    """The guest's disk of so many MiB, spread over the layers."""
    name = f"boot-{layers}-layers-{mib}M"
    directory, done = tools.WORK / name, tools.WORK / f"{name}.done"
    active = directory / f"layer-{layers - 1:05}.qcow2"
    if not done.exists():
        raw = tools.WORK / f"boot-{mib}M.raw"
        if not raw.exists():
            example("root", raw, mib)
        shutil.rmtree(directory, ignore_errors=True)
        tools.run(tools.ISOBATH, "chain", "generate", "--layers", layers, "--data", f"raw:{raw}", directory)
        done.touch()
    return active


def measure(name, layers):
    """Boots once, on a copy of the active layer, since the guest writes."""
    active = make(layers)
    image = active.with_name("run.qcow2")
    shutil.copyfile(active, image)
    chains.warm(active)
    try:
        if name in servers.qemus():
            return {"seconds": json.loads(example("qcow2", image, qemu=servers.qemus()[name]))["seconds"]}
        with servers.isobath(image) as server:
            # From the server's start: QEMU's own time has the opening of the chain in it too.
            return {"seconds": server.ready + json.loads(example("nbd", server.socket))["seconds"]}
    finally:
        image.unlink(missing_ok=True)


def run(rounds, seconds):
    del seconds
    samples = Samples()
    names = [name for name in chains.names() if name != chains.INDEXED]
    keys = [(name, layers) for name in names for layers in DEPTHS]
    for number in range(min(rounds, 3)):
        for key in rotated(keys, number * 4):
            # QEMU takes long on deep chains: once.
            if key not in samples or key[0] == chains.ISOBATH or key[1] < 500:
                samples.attempt(key, lambda: measure(*key))
    columns = [f"{layers:,} layer{'s' * (layers > 1)}, s" for layers in DEPTHS]
    rows = [[name, *(samples.text((name, layers), "seconds", "{:,.1f}") for layers in DEPTHS)] for name in names]
    curves = {name: [(layers, samples.median((name, layers), "seconds")) for layers in DEPTHS] for name in names}
    figure = plot.lines(
        "chain_depth-boot.svg", "A guest boots and reads 96 MiB", "layers", "seconds", curves,
        log_x=True, log_y=True, x_ticks=[1, 10, 50, 100, 500, 1000],
    )  # fmt: skip
    table = {
        "title": "Boot",
        "text": "A Linux guest (TCG) boots from the chain, reads a file of 96 MiB that is spread over all layers, and "
        "powers off: through `isobath serve`, its start included, and with QEMU opening the chain itself.",
        "columns": ["disk by", *columns],
        "rows": rows,
    }
    notes = [f"{key}: {each['why']}" for key in keys for each in samples.get(key, ()) if each.get("failed") == "failed"]
    return {"samples": samples.raw(), "tables": [table], "goals": [], "figures": [figure], "notes": notes}
