"""Chains of disks in use: what a stream and its guest cost each other, how fast a stream is, and how long a
snapshot holds requests up. Isobath's pacings side by side, and Isobath beside qemu-storage-daemon."""

from isobath_bench import scenario
from isobath_bench.live import pacing, snapshot_stall, steady, stream_speed, trace

PARTS = {
    "pacing": pacing,
    "steady": steady,
    "trace": trace,
    "stream_speed": stream_speed,
    "snapshot_stall": snapshot_stall,
}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
