"""Experiments of "Mitigating Sync Amplification for Copy-on-write Virtual Disk" (FAST '16)."""

from . import cluster_size, consistency, four_guests, macro, motivation, overwrite_append, sync_counts

TITLE = "Sync amplification (FAST '16)"
ABOUT = (
    "Chen, Liang, Xia, Chen and Kim: *Mitigating Sync Amplification for Copy-on-write Virtual Disk*. With a journal "
    "in each image, journaling of metadata alone\n"
    "where nothing is overwritten, and space allocated ahead of need, their QEMU 2.1.2 needs one sync of the image "
    "for each flush of a guest. Isobath has all\n"
    "three; it is measured beside today's QEMU, which has lost some of its syncs since."
)
EXPERIMENTS = [motivation, sync_counts, consistency, overwrite_append, macro, four_guests, cluster_size]
