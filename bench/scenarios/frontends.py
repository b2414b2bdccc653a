"""What a disk's frontends cost: vhost-user-blk, FUSE and NBD beside a raw file and QEMU's frontends to the same images,
ublk beside the kernel's loop device, and the engine behind them alone. Ratios are medians of those within a round;
NBD's are of medians."""

from isobath_bench import scenario
from isobath_bench.frontends import engine, fuse, idle, latency, nbd, neighbours, scale, sequential, ublk, vhost, writes

PARTS = {
    "vhost": vhost,
    "latency": latency,
    "sequential": sequential,
    "writes": writes,
    "scale": scale,
    "fuse": fuse,
    "ublk": ublk,
    "nbd": nbd,
    "engine": engine,
    "idle": idle,
    "neighbours": neighbours,
}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
