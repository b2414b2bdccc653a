"""Reads over NBD from one layer, page cache warm: 4 KiB random at queue depth 32, 1 MiB
sequential. Isobath and qemu-nbd serve the same qcow2 image, nbdkit the same bytes raw."""

from isobath_bench import fio, report, servers, tools

SIZE = 2 << 30
LOADS = {
    "4 KiB random read, qd 32": dict(rw="randread", block="4k", depth=32),
    "1 MiB sequential read, qd 4": dict(rw="read", block="1m", depth=4),
}


def images():
    """A raw file of random bytes and a qcow2 image of them, both in the page cache."""
    raw, qcow2 = tools.WORK / "reads.raw", tools.WORK / "reads.qcow2"
    if not qcow2.exists() or raw.stat().st_size != SIZE:
        tools.run("dd", "if=/dev/urandom", f"of={raw}", "bs=1M", f"count={SIZE >> 20}")
        tools.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, qcow2)
    for path in (raw, qcow2):
        tools.run("dd", f"if={path}", "of=/dev/null", "bs=1M")
    return raw, qcow2


def run(rounds, seconds):
    raw, qcow2 = images()
    peers = [
        lambda: servers.isobath(qcow2, "--read-only"),
        lambda: servers.qemu_nbd(qcow2, "--read-only"),
        lambda: servers.nbdkit(raw, "--readonly"),
    ]
    loads = {name: {} for name in LOADS}
    for number in range(rounds):
        for start in peers[number % 3 :] + peers[: number % 3]:
            with start() as server:
                for name, load in LOADS.items():
                    fio.load(server, **load, seconds=1)
                    sample = fio.load(server, **load, seconds=seconds)
                    sample["peak_rss"] = server.peak_rss()
                    loads[name].setdefault(server.name, []).append(sample)
    small, large = LOADS
    goal = report.goal
    goals = [
        goal(
            loads, "CPU per 4 KiB read ÷ nbdkit raw", small, "cpu_us_per_request", "isobath", "nbdkit raw", at_most=0.55
        ),
        goal(loads, "CPU per 4 KiB read ÷ qemu-nbd", small, "cpu_us_per_request", "isobath", "qemu-nbd", at_most=0.35),
        goal(loads, "IOPS ÷ qemu-nbd", small, "iops", "isobath", "qemu-nbd", at_least=1.3),
        goal(loads, "IOPS ÷ nbdkit raw", small, "iops", "isobath", "nbdkit raw", at_least=1.15),
        goal(loads, "sequential MiB/s ÷ nbdkit raw", large, "bytes_per_second", "isobath", "nbdkit raw", at_least=1.0),
    ]
    return {"rounds": rounds, "seconds": seconds, "loads": loads, "goals": goals}
