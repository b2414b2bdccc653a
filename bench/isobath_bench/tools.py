"""Programs the benchmarks run, and where their files lie."""

import contextlib
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
ISOBATH = Path(os.environ.get("ISOBATH", TARGET / "release" / "isobath")).absolute()
# On a disk, not in memory: io_uring on tmpfs goes through worker threads.
WORK = Path(os.environ.get("ISOBATH_BENCH_DIR", ROOT / "target" / "bench"))

# QEMU 10, where scripts/qemu10 has unpacked it.
QEMU10 = ROOT / "target" / "qemu10" / "bin"
# Small disks and short chains, to try a scenario out; set by bench/run --quick.
QUICK = False

PACKAGES = {
    "fio": "fio",
    "nbdcopy": "libnbd-bin",
    "nbdfuse": "libnbd-bin",
    "nbdkit": "nbdkit",
    "qemu-img": "qemu-utils",
    "qemu-io": "qemu-utils",
    "qemu-nbd": "qemu-utils",
    "qemu-storage-daemon": "qemu-system-common",
}


def require_all():
    """Ends the run with a clear message where a program is missing."""
    missing = sorted({PACKAGES[name] for name in PACKAGES if not shutil.which(name)})
    if missing:
        sys.exit(f"bench: install what is missing: apt-get install {' '.join(missing)}")
    if not ISOBATH.exists():
        sys.exit(f"bench: {ISOBATH} is not there: make build")
    WORK.mkdir(parents=True, exist_ok=True)
    # A chain takes a descriptor a layer.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Failed(RuntimeError):
    """A program that did not do what it was run for."""


def run(*command, **options):
    """Runs a command and gives its output."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise Failed(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{said}")
    return done.stdout


@contextlib.contextmanager
def in_memory(name):
    """A directory in memory where there is room for that, `isobath-NAME-...`; gone afterwards. While it is locked,
    scripts/sweep leaves it alone."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix=f"isobath-{name}-", dir=memory if memory.is_dir() else WORK))
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield directory
    finally:
        shutil.rmtree(directory)
        os.close(lock)


def timed(*command):
    """Runs a command and gives the seconds it took."""
    began = time.perf_counter()
    run(*command)
    return time.perf_counter() - began


def drop_caches(programs=True):
    """Empties the page cache, but for the programs that are measured, if these are to stay."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        raise Failed(f"the page cache cannot be dropped: {error}; run as root") from error
    if not programs:
        return
    for program in (ISOBATH, "qemu-nbd", "fio", QEMU10 / "qemu-nbd"):
        if shutil.which(program):
            run(program, "--version")


def version(*command):
    """The first line that a program prints of its own version."""
    return run(*command).splitlines()[0]
