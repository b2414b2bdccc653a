"""The experiments of five papers on disk images, run again: Isobath beside QEMU.

`plan` says what an experiment is, `runner` has it measured, `record` keeps what was measured, `stats` sums it up, and
`page` with `figures` show it. `stage` holds what experiments are made on: slow disks, served images, file systems. Each
paper is a package of experiments, a module for each.
"""

PAPERS = ["svd", "fast16", "selfie", "streaming"]
# What no paper measures. It is counted, on a machine however busy, and each experiment is measured and kept by itself.
BEYOND = ["beyond"]
