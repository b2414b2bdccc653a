"""The frontends: vhost-user-blk, FUSE, ublk and NBD, and the engine behind them alone.

What a frontend costs is told beside the same bytes in a raw file, and beside QEMU's frontends to the same images. Each
part is a module with `run(rounds, seconds)`.
"""
