"""What a read of 4 KiB alone takes longer through vhost-user-blk than from the raw file by the same program."""

from .. import report
from ..rounds import Samples, rotated
from . import images, load, paired, served

RAW = "raw file"
POLL, SLEEP = "polling", "sleeping"
MOST = {POLL: 1.2, SLEEP: 8}


def measure(name, how, seconds):
    poll = how == POLL
    small = dict(depth=1, poll=poll)
    if name == RAW:
        images.warm(images.raw())
        return load.raw(images.raw(), **small, seconds=seconds)
    image = images.chain(1)
    images.warm(image)
    with served.vhost_user(name, image, poll=poll) as server:
        load.vhost_user(server, **small, seconds=min(seconds, 1))
        return load.vhost_user(server, **small, seconds=seconds)


def run(rounds, seconds):
    samples, qemu = Samples(), served.qemu_name()
    keys = [(name, how) for how in MOST for name in (RAW, served.ISOBATH, qemu)]
    for number in range(rounds):
        for key in rotated(keys, number):
            samples.attempt(key, lambda: measure(*key, seconds))
    rows, goals = [], []
    for key in keys:
        name, how = key
        added = paired.more(samples, key, (RAW, how), "p50_us")
        rows.append(
            [
                how,
                name,
                samples.text(key, "p50_us", "{:.2f}"),
                "" if name == RAW else paired.text(added, "{:.2f}"),
                samples.text(key, "p99_us", "{:.1f}"),
                samples.text(key, "cpu_us", "{:.2f}"),
                samples.text(key, "server_cpu_us", "{:.2f}"),
            ]
        )
        if name == served.ISOBATH:
            what = f"vhost-user-blk, queue depth 1, {how}: median latency beyond the raw file's"
            goals.append(report.limit(what, added, at_most=MOST[how], unit="µs", why=samples.failure(key)))
    table = {
        "title": "vhost-user-blk: latency of a 4 KiB read alone",
        "text": (
            "One layer, page cache. *Polling*: the client looks for completions all the time, the server polls for its"
            " default time; *sleeping*: both sleep at once."
        ),
        "columns": ["waiting", "server", "median µs", "beyond raw", "p99 µs", "CPU µs per I/O", "the server's"],
        "rows": rows,
    }
    return paired.part(samples, [table], goals)
