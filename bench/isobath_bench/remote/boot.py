"""A guest that boots through an overlay: above the files, and above the store with an empty cache."""

import json

from .. import report, servers, tools
from ..depth import boot, chains
from ..rounds import Samples, rotated
from . import Store, emptied, link, pushed

FILES, STORE = "files", "the store"
# How many MiB the guest reads of a file of 96 MiB.
READ = 8


def measure(store, where, active, address):
    overlay, cache = active.with_name("run.qcow2"), emptied("cache")
    overlay.unlink(missing_ok=True)
    try:
        if where == FILES:
            chains.warm(active)
            tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", active.name, "-F", "qcow2", overlay)
            server = servers.isobath(overlay)
        else:
            store.taken()
            server = store.serve(address, cache, "--overlay", overlay)
        with server:
            # From the server's start.
            seconds = server.ready + json.loads(boot.example("nbd", server.socket, READ))["seconds"]
        counts = store.taken()
        return counts | {"seconds": seconds, "share": counts["fetched"] / base(active)}
    finally:
        overlay.unlink(missing_ok=True)


def base(active):
    """Bytes of the files of a chain."""
    return sum(path.stat().st_size for path in active.parent.glob("layer-*.qcow2"))


def run(rounds, seconds):
    del seconds
    depths = [1] if tools.QUICK else [1, 30]
    actives = {layers: boot.make(layers) for layers in depths}
    addresses = {layers: pushed(active) for layers, active in actives.items()}
    keys = [(where, layers) for layers in depths for where in (FILES, STORE)]
    samples = Samples()
    with Store() as store:
        for number in range(rounds):
            for where, layers in rotated(keys, number):
                samples.attempt((where, layers), lambda: measure(store, where, actives[layers], addresses[layers]))
    emptied("cache")
    rows, goals = [], []
    for layers in depths:
        files, remote = (FILES, layers), (STORE, layers)
        depth = f"{layers} layer{'s' * (layers > 1)}"
        ratio = report.ratio(samples.median(remote, "seconds"), samples.median(files, "seconds"))
        why = samples.failure(remote) or samples.failure(files)
        share = samples.median(remote, "share")
        goals += [
            report.limit(f"boot from the store ÷ from files, {depth}", ratio, at_most=2, why=why),
            report.limit(f"bytes fetched by it ÷ the chain's, {depth}", share, at_most=0.1, why=why, digits=3),
        ]
        rows.append(
            [
                f"{layers}",
                samples.text(files, "seconds", "{:.1f}"),
                samples.text(remote, "seconds", "{:.1f}"),
                "-" if ratio is None else f"{ratio:.2f}x",
                samples.text(remote, "requests"),
                samples.text(remote, "of_layers"),
                samples.text(remote, "fetched", "{:,.1f}", 2**-20),
                samples.text(remote, "share", "{:.3f}x"),
            ]
        )
    table = {
        "title": "Boot from a store",
        "text": (
            f"A Linux guest (TCG; its kernel is not on the disk) boots with a new overlay above a chain of a disk of"
            f" 160 MiB, reads {READ} MiB of a file of 96 MiB, and powers off: from the start of `isobath serve` to the"
            f" guest's end. The store is behind a link with {link()}, and the cache is empty."
        ),
        "columns": [
            "layers",
            "files, s",
            "store, s",
            "ratio",
            "requests",
            "of layers",
            "MiB fetched",
            "÷ the chain's bytes",
        ],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [], "notes": []}
