"""Streaming that makes way for the guest: a dissertation of 2024."""

from . import bursty, motivation, trace, ycsb_e

TITLE = "Adaptively streaming disk images"
ABOUT = (
    "*Adaptively Streaming QCOW2 Disk Images in QEMU*, an MSc dissertation of the University of Manchester, 2024, "
    "has QEMU's\n"
    "`block-stream` pause while the guest is busy. It measures QEMU 9.0 on a Xeon 5320 with a guest of 4 "
    "processors, 4 GB of memory\n"
    "and a disk of 50 GB; most of its figures are means of 15 runs."
)
EXPERIMENTS = [motivation, trace, ycsb_e, bursty]
