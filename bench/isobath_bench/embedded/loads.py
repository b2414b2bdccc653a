"""Load: writes at given places, each with a flush behind it, by any number of writers for some time."""

import json
import random

from .. import tools
from ..flush import log

CLUSTER = 64 << 10
# What LZ4 makes room in, in each 512 bytes; and what it does not.
COMPRESSIBLE = ["--refill_buffers", "--buffer_compress_percentage=50", "--buffer_compress_chunk=512"]
INCOMPRESSIBLE = ["--refill_buffers"]


def sequential(size, block, writers, most):
    """Places for each writer, one behind the other in a part of the disk of its own."""
    part = size // writers // CLUSTER * CLUSTER
    count = min(part // block, most // writers)
    return [[writer * part + number * block for number in range(count)] for writer in range(writers)]


def scattered(size, block, writers, most, seed, within=None):
    """Places for each writer, each in a cluster of its own: at `within`, or anywhere in it."""
    choice = random.Random(seed)
    clusters = choice.sample(range(size // CLUSTER), min(size // CLUSTER, most))
    inside = range(0, CLUSTER - block + 1, 4096)
    places = [cluster * CLUSTER + (choice.choice(inside) if within is None else within) for cluster in clusters]
    return [places[writer::writers] for writer in range(writers)]


def write_and_flush(server, places, block, seconds=None, data=COMPRESSIBLE):
    """Has each writer write at its places and wait for a flush behind each, for at most some seconds."""
    command = ["fio", "--output-format=json", "--thread", *([f"--runtime={seconds}"] if seconds else [])]
    paths = []
    for number, each in enumerate(places):
        path = tools.WORK / f"embedded-{number}.iolog"
        steps = "".join(f"nbd {what} {offset} {length}\n" for what, offset, length in log.write_and_flush(each, block))
        path.write_text(f"{log.HEADER}{steps}nbd close\n")
        paths.append(path)
        command += [f"--name=writer-{number}", "--ioengine=nbd", f"--uri={server.uri}", f"--read_iolog={path}", *data]
    before = server.cpu()
    try:
        out = tools.run(*command)
    except tools.Failed as error:
        raise tools.Failed(f"{server.state()}; {str(error)[-300:]}") from error
    finally:
        for path in paths:
            path.unlink()
    cpu = server.cpu() - before
    jobs = json.loads(out[out.index("{") :])["jobs"]
    if failed := [job["error"] for job in jobs if job["error"]]:
        raise tools.Failed(f"{server.name}: writers failed with {failed}")
    counts = [job["sync"].get("total_ios", 0) for job in jobs]
    flushes = sum(counts)
    if not seconds and flushes != sum(map(len, places)):
        raise tools.Failed(f"{server.name}: {flushes} flushes were done, of {sum(map(len, places))}")
    # What each writer waited for its requests, without fio's own start.
    waited = [
        sum(
            job[side]["lat_ns"]["mean"] * job[side]["total_ios"]
            for side in ("write", "sync")
            if job[side].get("total_ios")
        )
        / 1e9
        for job in jobs
    ]
    rate = sum(count / time for count, time in zip(counts, waited) if time)
    return {
        "flushes": flushes,
        "flushes_per_second": rate,
        "bytes_per_second": rate * block,
        "cpu_us": cpu / max(flushes, 1) * 1e6,
    }
