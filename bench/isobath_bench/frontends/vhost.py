"""4 KiB random reads through vhost-user-blk, 32 at a time: by chain length, beside raw and QEMU."""

from .. import plot
from ..rounds import Samples, rotated
from . import images, load, paired, served
from .paired import DIRECT, PAGE_CACHE

FIO, LOAD = "raw file, fio", "raw file, isobath-load"
LAYERS = [1, 1000]
# Rounds in which QEMU has the longest chain: it needs most of a minute for some ten requests.
SLOW_ROUNDS = 1


def measure(cache, name, layers, seconds):
    direct = cache == DIRECT
    if name in (FIO, LOAD):
        images.warm(*([] if direct else [images.raw()]))
        program = load.fio if name == FIO else load.raw
        return program(images.raw(), direct=direct, seconds=seconds)
    image = images.chain(layers)
    images.warm(*([] if direct else [image]))
    # There is nothing to warm: it looks at every layer in each read.
    slow = name != served.ISOBATH and layers > 1
    with served.vhost_user(name, image, direct=direct) as server:
        if not slow:
            load.vhost_user(server, seconds=min(seconds, 1))
        return load.vhost_user(server, seconds=min(seconds, 1) if slow else seconds)


def run(rounds, seconds):
    samples, qemu = Samples(), served.qemu_name()
    keys = [(cache, name, 1) for cache in (PAGE_CACHE, DIRECT) for name in (FIO, LOAD)]
    keys += [
        (cache, name, layers) for cache in (PAGE_CACHE, DIRECT) for name in (served.ISOBATH, qemu) for layers in LAYERS
    ]
    for number in range(rounds):
        for key in rotated(sorted(keys), number * 3):
            if key[1:] == (qemu, LAYERS[-1]) and number >= SLOW_ROUNDS:
                continue
            samples.attempt(key, lambda: measure(*key, seconds))
    rows, goals, bars = [], [], {}
    for cache in (PAGE_CACHE, DIRECT):
        raw = (cache, FIO, 1)
        for key in (key for key in keys if key[0] == cache):
            _, name, layers = key
            rows.append([
                cache, name, "" if name in (FIO, LOAD) else f"{layers:,}", samples.text(key, "iops"),
                paired.text(paired.ratio(samples, key, raw, "iops")), samples.text(key, "cpu_us", "{:.2f}"),
                paired.text(paired.ratio(samples, key, raw, "cpu_us")), samples.text(key, "server_cpu_us", "{:.2f}"),
                samples.text(key, "p50_us"), samples.text(key, "p99_us"),
            ])  # fmt: skip
            label = name if name in (FIO, LOAD) else f"{name}, {layers:,} layer{'s' if layers > 1 else ''}"
            bars.setdefault(cache, {})[label] = samples.median(key, "iops")
        for layers in LAYERS:
            own, what = (
                (
                    cache,
                    served.ISOBATH,
                    layers,
                ),
                f"vhost-user-blk, {cache}, {layers:,} layer{'s' if layers > 1 else ''}",
            )
            least = 1.0 if cache == PAGE_CACHE else 0.98
            goals += [
                paired.goal(samples, f"{what}: IOPS ÷ raw by fio", own, raw, "iops", at_least=least),
                paired.goal(samples, f"{what}: CPU per I/O ÷ raw by fio", own, raw, "cpu_us", at_most=1.1),
            ]
            peer = (cache, qemu, layers)
            if layers == 1:
                goals.append(paired.goal(samples, f"{what}: IOPS ÷ {qemu}", own, peer, "iops", at_least=1.5))
                goals.append(paired.goal(samples, f"{what}: CPU per I/O ÷ {qemu}", own, peer, "cpu_us", at_most=0.5))
            else:
                one = (cache, served.ISOBATH, 1)
                goals.append(paired.goal(samples, f"{what}: IOPS ÷ 1 layer", own, one, "iops", at_least=0.98))
                goals.append(paired.goal(samples, f"{what}: CPU per I/O ÷ 1 layer", own, one, "cpu_us", at_most=1.02))
                goals.append(paired.goal(samples, f"{what}: IOPS ÷ {qemu}", own, peer, "iops", at_least=1000))
    table = {
        "title": "vhost-user-blk: 4 KiB random reads, queue depth 32",
        "text": (
            f"A disk of {images.size() >> 20:,} MiB, all of it data in clusters of 64 KiB that belong to random layers."
            " CPU per I/O: the client's and the server's together; a raw file has no server."
        ),
        "columns": [
            "cache",
            "server",
            "layers",
            "IOPS",
            "÷ raw by fio",
            "CPU µs per I/O",
            "÷ raw by fio",
            "the server's",
            "median µs",
            "p99 µs",
        ],
        "rows": rows,
    }
    figure = plot.bars(
        "frontends-vhost.svg", "4 KiB random reads through vhost-user-blk, queue depth 32", "IOPS", bars, log=True
    )
    return paired.part(samples, [table], goals, [figure])
