"""SVD: A Scalable Virtual Machine Disk Format (IEEE TCC 2024), its evaluation."""

from . import boot, dd, equation, events, fio_cache, formats, latency, memory, motivation, snapshots, ycsb

TITLE = "SVD: A Scalable Virtual Machine Disk Format"
ABOUT = (
    "SVD (also sQemu) notes in each entry of an L2 table which layer of the chain has the cluster, and has one cache of"
    " tables for the whole chain. The authors' prototype is a fork of QEMU 4.2. Isobath has one map for the chain, and"
    " a direct-access index in overlays, which other programs ignore. The paper counts *snapshots*, the files below the"
    " active one; here *layers* are counted, which are one more."
)
# In the order of the page.
EXPERIMENTS = [motivation, formats, memory, events, latency, boot, ycsb, dd, fio_cache, snapshots, equation]
