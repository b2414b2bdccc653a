"""Selfie (SYSTOR '15): metadata that travels in its data."""

from . import dd, kernel_build, postmark, recovery, sync_writes

TITLE = "Selfie: co-locating metadata and data"
ABOUT = (
    "X. Wu, Z. Shao, S. Jiang: *Selfie: Co-locating Metadata and Data to Enable Fast Virtual Block Devices* (SYSTOR"
    " 2015). Its format compresses the first 4 KiB of a new cluster a little, and puts the cluster's mapping into the"
    " room gained: data and mapping are one write. Isobath does this within qcow2, by `serve --metadata embedded`."
)
EXPERIMENTS = [sync_writes, dd, kernel_build, postmark, recovery]
