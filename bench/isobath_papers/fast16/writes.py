"""Programs of a guest that write to one file: with a sync behind each write, or past its page cache."""

import mmap
import os
import random
import time

BLOCK = 64 << 10


def bytes_of(length):
    """Bytes of which each half KiB compresses to its half, aligned as O_DIRECT wants them."""
    data = mmap.mmap(-1, length)
    data.write(b"".join(os.urandom(256) + b"text" * 64 for _ in range(length // 512)))
    return data


def synced(path, seconds, start=0, most=1 << 30, block=BLOCK):
    """Writes a block behind the other, each with an fdatasync, for some seconds or as many bytes: how many, and the
    seconds."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        data, place, count = bytes_of(block), start, 0
        began = now = time.perf_counter()
        while now < began + seconds and place + block <= most:
            os.pwrite(file, data, place)
            os.fdatasync(file)
            place, count, now = place + block, count + 1, time.perf_counter()
        return count, now - began
    finally:
        os.close(file)


def warmed(path, seconds, warm_up, most):
    """As `synced`, after some seconds that do not count."""
    count, _ = synced(path, warm_up, most=most)
    return synced(path, seconds, count * BLOCK, most)


def direct(path, amount):
    """Writes so many bytes past the guest's page cache, a block behind the other, and syncs them at the end: the
    seconds."""
    return placed(path, BLOCK, range(0, amount, BLOCK))


def scattered(path, count, seed, block=4096):
    """Writes so many blocks anywhere in a file, past the guest's page cache, and syncs them at the end: the seconds."""
    blocks = os.path.getsize(path) // block
    return placed(path, block, (number * block for number in random.Random(seed).sample(range(blocks), count)))


def placed(path, block, places):
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        data = bytes_of(block)
        began = time.perf_counter()
        for place in places:
            os.pwrite(file, data, place)
        os.fsync(file)
        return time.perf_counter() - began
    finally:
        os.close(file)
