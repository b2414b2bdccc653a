"""A guest that boots through an overlay: above the files, and above the store with an empty cache, without and with a
trace."""

import json
import time

from .. import plot, report, servers, tools
from ..depth import boot, chains
from ..rounds import Samples, rotated
from . import Store, emptied, link, manifest_of, pushed

FILES, STORE, TRACED = "files", "the store", "the store, with a trace"
# How many MiB the guest reads of a file of 96 MiB.
READ = 8
# What names the chain that has a trace.
SUFFIX = "-traced"


def size():
    """MiB of the disk."""
    return 160 if tools.QUICK else 4096


def measure(store, where, active, address):
    overlay, cache = active.with_name("run.qcow2"), emptied("cache")
    overlay.unlink(missing_ok=True)
    boot.program()
    try:
        if where == FILES:
            chains.warm(active)
            tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", active.name, "-F", "qcow2", overlay)
        else:
            store.taken()
        # A server follows a trace from its start on.
        began = time.perf_counter()
        if where == FILES:
            server = servers.isobath(overlay)
        else:
            server = store.serve(address, cache, "--overlay", overlay)
        with server:
            boot.example("nbd", server.socket, READ)
            seconds = time.perf_counter() - began
        counts = store.taken()
        return counts | {"seconds": seconds, "share": counts["fetched"] / base(active)}
    finally:
        overlay.unlink(missing_ok=True)


def traced(active):
    """The name in the store of the chain with a trace of one boot."""
    address = pushed(active, suffix=SUFFIX)
    if "trace" in json.loads(manifest_of(active.parent.name + SUFFIX).read_text()):
        return address
    overlay, trace = active.with_name("run.qcow2"), active.with_name("boot.trace")
    for left in (overlay, trace):
        left.unlink(missing_ok=True)
    with Store(near=True) as store:
        recording = ("--overlay", overlay, "--record-trace", trace)
        with store.serve(address, emptied("cache"), *recording) as server:
            boot.example("nbd", server.socket, READ)
        store.run("remote", "trace", address, trace)
    overlay.unlink()
    return address


def base(active):
    """Bytes of the files of a chain."""
    return sum(path.stat().st_size for path in active.parent.glob("layer-*.qcow2"))


def run(rounds, seconds):
    del seconds
    depths = [1] if tools.QUICK else [1, 30, 1000]
    actives = {layers: boot.make(layers, size()) for layers in depths}
    addresses = {}
    for layers, active in actives.items():
        addresses |= {(FILES, layers): None, (STORE, layers): pushed(active), (TRACED, layers): traced(active)}
    samples = Samples()
    with Store() as store:
        for number in range(rounds):
            for where, layers in rotated(list(addresses), number):
                address = addresses[where, layers]
                samples.attempt((where, layers), lambda: measure(store, where, actives[layers], address))
    emptied("cache")
    rows, goals = [], []
    for layers in depths:
        depth = f"{layers:,} layer{'s' * (layers > 1)}"
        files = samples.median((FILES, layers), "seconds")
        for where in (FILES, STORE, TRACED):
            key = (where, layers)
            ratio = report.ratio(samples.median(key, "seconds"), files)
            row = [f"{layers:,}", where, samples.text(key, "seconds", "{:.1f}")]
            if where == FILES:
                rows.append([*row, "1.00x", "-", "-", "-", "-"])
                continue
            why = samples.failure(key) or samples.failure((FILES, layers))
            most, share = (2 if where == STORE else 1.3), samples.median(key, "share")
            goals += [
                report.limit(f"boot from {where} ÷ from files, {depth}", ratio, at_most=most, why=why),
                report.limit(f"bytes fetched by it ÷ the chain's, {depth}", share, at_most=0.1, why=why, digits=3),
            ]
            rows.append(
                [
                    *row,
                    "-" if ratio is None else f"{ratio:.2f}x",
                    samples.text(key, "requests"),
                    samples.text(key, "of_layers"),
                    samples.text(key, "fetched", "{:,.1f}", 2**-20),
                    samples.text(key, "share", "{:.3f}x"),
                ]
            )
    table = {
        "title": "Boot from a store",
        "text": (
            f"A Linux guest (TCG; its kernel is not on the disk) boots with a new overlay above a chain of a disk of"
            f" {size():,} MiB, reads {READ} MiB of a file of 96 MiB, and powers off: from the start of `isobath serve`"
            f" to the guest's end. The store is behind a link with {link()}, and the cache is empty. *With a trace*:"
            " that of an earlier boot is beside the chain."
        ),
        "columns": [
            "layers",
            "base in",
            "s",
            "÷ files",
            "requests",
            "of layers",
            "MiB fetched",
            "÷ the chain's bytes",
        ],
        "rows": rows,
    }
    groups = {
        f"{layers:,} layer{'s' * (layers > 1)}": {
            where: samples.median((where, layers), "seconds") for where in (FILES, STORE, TRACED)
        }
        for layers in depths
    }
    figure = plot.bars("remote-boot.svg", "A guest boots, with an empty cache", "seconds", groups, unit="s")
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
