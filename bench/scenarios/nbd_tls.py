"""Reads over NBD with TLS, page cache warm: 4 KiB random at queue depth 16, 1 MiB sequential. Isobath and qemu-nbd
serve the same qcow2 image, nbdkit the same bytes raw. Clients show no certificate: fio does not let libnbd read one."""

from isobath_bench import fio, report, servers, tools

from .nbd_reads import images

LOADS = {
    "4 KiB random read, qd 16, TLS": dict(rw="randread", block="4k", depth=16),
    "1 MiB sequential read, qd 4, TLS": dict(rw="read", block="1m", depth=4),
}
DAYS = "3650"


def certificates():
    """A directory with the credentials of a server, under QEMU's names."""
    place = tools.WORK / "tls"
    directory = place / "server"
    if (directory / "ca-cert.pem").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    own = ["-newkey", "rsa:3072", "-nodes"]
    tools.run(
        "openssl", "req", "-x509", *own, "-days", DAYS, "-subj", "/CN=Authority", "-addext",
        "keyUsage=critical,keyCertSign", "-keyout", place / "ca-key.pem", "-out", place / "ca-cert.pem",
    )  # fmt: skip
    (place / "extension").write_text("subjectAltName=DNS:localhost")
    tools.run(
        "openssl", "req", "-new", *own, "-subj", "/CN=localhost", "-keyout", directory / "server-key.pem",
        "-out", place / "request.pem",
    )  # fmt: skip
    tools.run(
        "openssl", "x509", "-req", "-days", DAYS, "-in", place / "request.pem", "-CA", place / "ca-cert.pem",
        "-CAkey", place / "ca-key.pem", "-CAcreateserial", "-extfile", place / "extension",
        "-out", directory / "server-cert.pem",
    )  # fmt: skip
    (directory / "ca-cert.pem").write_bytes((place / "ca-cert.pem").read_bytes())
    return directory


def run(rounds, seconds):
    raw, qcow2 = images()
    server = certificates()
    socket = f"unix:{tools.WORK}/isobath.sock"
    listen = ["--nbd", f"{socket},tls=required", "--tls-creds", server, "--tls-verify-peer", "no"]
    objects = ["--object", f"tls-creds-x509,id=t,endpoint=server,dir={server},verify-peer=off"]
    objects += ["--tls-creds", "t"]
    require = ["--tls=require", f"--tls-certificates={server}"]
    peers = [
        lambda: servers.isobath(qcow2, "--read-only", listen=listen),
        lambda: servers.qemu_nbd(qcow2, "--read-only", *objects),
        lambda: servers.nbdkit(raw, "--readonly", *require),
    ]
    loads = {name: {} for name in LOADS}
    for number in range(rounds):
        for start in peers[number % 3 :] + peers[: number % 3]:
            with start() as one:
                one.uri = f"nbds+unix://localhost/?socket={one.socket}&tls-verify-peer=false"
                for name, load in LOADS.items():
                    fio.load(one, **load, seconds=1)
                    loads[name].setdefault(one.name, []).append(fio.load(one, **load, seconds=seconds))
    small, large = LOADS
    goals = [
        report.goal(loads, f"{what} ÷ {peer}", load, key, "isobath", peer, at_least=1.3)
        for peer in ("qemu-nbd", "nbdkit raw")
        for what, load, key in (("IOPS", small, "iops"), ("sequential MiB/s", large, "bytes_per_second"))
    ]
    return {"rounds": rounds, "seconds": seconds, "loads": loads, "goals": goals}
