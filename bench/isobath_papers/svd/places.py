"""Where the chains of the applications lie: in the work directory with the page cache warm, or on the simulated file
server."""

import contextlib

from isobath_bench import tools
from isobath_bench.depth import chains

from .. import figures
from ..stage import slow
from .passes import INDEXED

ABOUT_NFS = (
    "The paper's images lie on an NFS server behind 10 Gbit/s; here they lie on a simulated disk"
    f" ({slow.ABOUT['nfs']}), without the host's page cache (O_DIRECT), so that a miss costs what it costs there."
)

NFS, CACHED = "nfs", "page cache"


class Place:
    """Chains by the number of their layers, and how their disks are opened."""

    def __init__(self, cache, actives, device=None):
        self.cache = cache
        self.actives = actives
        # The simulated disk, if it is one.
        self.device = device

    def active(self, contender, layers):
        """The active layer of a contender's chain."""
        plain = self.actives[layers]
        return indexed(plain) if contender == INDEXED and layers > 1 else plain

    def reading(self, contender, layers):
        """The active layer, to be read; all its chain's files in the page cache, if that is used."""
        active = self.active(contender, layers)
        if not self.device:
            chains.warm(active)
        return active

    @contextlib.contextmanager
    def fresh(self, contender, layers):
        """A copy of the active layer, to be written; all its chain's files in the page cache, if that is used."""
        active = self.reading(contender, layers)
        image = active.with_name("run.qcow2")
        tools.run("cp", active, image)
        try:
            yield image
        finally:
            image.unlink(missing_ok=True)


def indexed(active):
    """The file beside an active layer that is the same with an index of the layers below."""
    return active.with_name("indexed.qcow2")


def index(active):
    """Makes it, unless it is there."""
    if not indexed(active).exists():
        new = active.with_name("new.qcow2")
        tools.run("cp", active, new)
        tools.run(tools.ISOBATH, "index", new)
        new.rename(indexed(active))


def in_page_cache(actives):
    """Chains where they are. `actives`: active layers by the number of layers."""
    for layers, active in actives.items():
        if layers > 1:
            index(active)
    return Place("writeback", actives)


@contextlib.contextmanager
def on_nfs(actives):
    """Copies of chains on the simulated file server."""
    files = [path for active in actives.values() for path in active.parent.iterdir()]
    size = sum(path.stat().st_blocks * 512 for path in files)
    with slow.device("nfs", size * 5 // 4 + (1 << 30)) as device:
        copies = {}
        for layers, active in actives.items():
            directory = device.directory / f"{layers}-layers"
            tools.run("cp", "--recursive", "--sparse=always", active.parent, directory)
            copies[layers] = directory / active.name
            # The index holds what the layers' files are, so it is made anew.
            indexed(copies[layers]).unlink(missing_ok=True)
            if layers > 1:
                index(copies[layers])
        device.settle()
        yield Place("none", copies, device)


def panels(results, name, title, curves, paper, x_label, y_label, ticks, **how):
    """A figure with a panel for each place, `curves` by place; the paper's curves are with those of its own kind of
    place."""
    with figures.drawn(results, name, title, columns=2) as (_, axes):
        for each, where in zip(axes, (NFS, CACHED), strict=True):
            figures.plot_lines(each, curves[where], paper if where == NFS else {})
            figures.decorate(each, x_label, y_label, ticks=ticks, **how)
            each.set_title({NFS: "simulated file server, O_DIRECT", CACHED: "page cache"}[where], fontsize=9)
    return figures.saved(results, name, title)
