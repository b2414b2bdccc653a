"""Figure 12: the time in which a guest boots, over the number of layers."""

import contextlib
import json

from isobath_bench import servers, tools
from isobath_bench.depth import boot

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Cause, compared
from . import passes, places
from .passes import INDEXED
from .places import CACHED, NFS

NAME = "boot"
TITLE = "Boot over the number of layers"
SOURCE = "SVD, figure 12"

# Raw data of the authors' published notebook: seconds on a disk of 50 GB by layers.
PAPER = {
    "QEMU": {1: 10.24, 50: 12.49, 100: 12.85, 300: 20.10, 500: 26.94, 1000: 42.96},
    "SVD": {1: 10.19, 50: 11.01, 100: 11.17, 300: 11.37, 500: 12.15, 1000: 17.39},
}
# As the paper's; QEMU gives it to the active layer, and chooses for all others.
L2_CACHE = "2M"
# Few layers, where QEMU is measured with a server of its own, too.
BY_NBD = [1, 50]


def depths(profile):
    return profile.of([1], [1, 50, 300, 500, 1000])


def points(profile):
    qemu, deepest = passes.qemu(), depths(profile)[-1]
    found = []
    for layers in depths(profile):
        for who in (INDEXED, qemu):
            found.append(
                Point(
                    (NFS, who, layers),
                    seconds=8 if passes.own(who) else 8 + layers / 40,
                )
            )
    found += [Point((NFS, f"{qemu} by NBD", layers), seconds=8) for layers in profile.of([], BY_NBD)]
    for layers in profile.of([], [1, deepest]):
        for who in (INDEXED, qemu):
            found.append(Point((CACHED, who, layers), seconds=8 if passes.own(who) else 8 + layers / 80))
    return found


@contextlib.contextmanager
def setting(profile):
    actives = {layers: boot.make(layers) for layers in depths(profile)}
    with places.on_nfs(actives) as nfs:
        yield {NFS: nfs, CACHED: places.in_page_cache(actives)}


def measure(setting, point, number):
    del number
    where, who, layers = point.key
    place = setting[where]
    with place.fresh(who, layers) as image:
        if who in servers.qemus():
            spec = f"{image},cache={place.cache},aio=io_uring,l2-cache-size={L2_CACHE}"
            return {"seconds": json.loads(boot.example("qcow2", spec, qemu=servers.qemus()[who]))["seconds"]}
        with served(who, image, place.cache) as server:
            # From the server's start: QEMU's own time has the opening of the chain in it too.
            guest = json.loads(boot.example("nbd", server.socket))["seconds"]
            return {"seconds": server.ready + guest, "ready": server.ready}


def served(who, image, cache):
    """A disk over NBD."""
    if passes.own(who):
        return servers.isobath(image, "--cache", cache)
    socket = tools.WORK / "boot.sock"
    return servers.Server(
        who,
        [
            "qemu-nbd",
            "--persistent",
            "--format=qcow2",
            "--aio=io_uring",
            f"--cache={cache}",
            f"--socket={socket}",
            image,
        ],
        socket,
    )


def why(results, layers):
    """What a chain has little part in: the way to the disk where it is short, else the guest's own time."""
    qemu = passes.qemu()
    keys = ((qemu, 1), (qemu, layers), (f"{qemu} by NBD", layers))
    flat, direct, by_nbd = (results.median((NFS, *key), "seconds") for key in keys)
    if layers in BY_NBD and None not in (direct, by_nbd):
        way = "the guest reaches isobath by NBD, a process more on the way, and a few layers have little to gain"
        return f"{way}; the same way makes QEMU's own {direct:.1f} s {by_nbd:.1f} s"
    if None in (flat, direct):
        return ""
    return (
        f"the emulated guest takes {flat:.1f} s of the {direct:.1f} s with QEMU on one layer, too, and reads little"
        " more than 100 MiB of the chain"
    )


def section(results):
    qemu, profile = passes.qemu(), results.profile
    counts = depths(profile)
    names = (INDEXED, qemu)
    with figures.drawn(results, "fig12", "Boot", columns=2) as (_, axes):
        figures.plot_lines(
            axes[0],
            {who: [(layers, results.median((NFS, who, layers), "seconds")) for layers in counts] for who in names},
        )
        axes[0].set_title("here")
        figures.plot_lines(axes[1], {}, {who: list(PAPER[who].items()) for who in PAPER})
        axes[1].set_title("paper")
        for each in axes:
            figures.decorate(each, "layers", "seconds")
    rows = [
        [where, who, *(results.text((where, who, layers), "seconds", "{:,.1f}") for layers in counts)]
        for where in (NFS, CACHED)
        for who in (*names, *([f"{qemu} by NBD"] if where == NFS else []))
    ]
    table = Table(
        "Seconds from the start to the guest's end",
        ["disk", "server", *(f"{layers:,} layer{'s' * (layers > 1)}" for layers in counts)],
        rows,
    )
    verdicts = [
        compared(
            results,
            f"boot, {layers:,} layer{'s' * (layers > 1)}: QEMU ÷ SVD",
            PAPER["QEMU"][layers] / PAPER["SVD"][layers],
            (NFS, qemu, layers),
            (NFS, INDEXED, layers),
            "seconds",
            why=why(results, layers),
            cause=Cause.MACHINE,
        )
        for layers in counts
    ]
    paper = PAPER["SVD"][1000] / PAPER["SVD"][1]
    verdicts.append(
        compared(
            results,
            "boot: SVD, 1,000 layers ÷ 1",
            paper,
            (NFS, INDEXED, 1000),
            (NFS, INDEXED, 1),
            "seconds",
            better="lower",
        )
    )
    return Section(
        paper=(
            "Until `login:` of an Ubuntu guest QEMU takes 10 s on one layer and 43 s on 1,000 (4.2 times), SVD 10 s and"
            " 17 s (1.7 times). The size of the disk, 50 or 150 GB, has no part in it."
        ),
        ours=(
            "A Linux guest boots from the chain, reads a file of 96 MiB that is spread over all layers, and powers"
            " off. It runs without hardware acceleration, so that most of its time is the processor's. QEMU opens the"
            " chain itself, isobath serves it to QEMU over NBD, its start included; *by NBD* is QEMU's own server in"
            f" its place. One disk of 160 MiB, since the disk's size has no part in it; `l2-cache-size={L2_CACHE}` as"
            f" in the paper, which all tables fit. {places.ABOUT_NFS}"
        ),
        parts=[figures.saved(results, "fig12", "Boot"), table],
        verdicts=verdicts,
    )
