"""Programs the benchmarks run, and where their files lie."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
ISOBATH = Path(os.environ.get("ISOBATH", TARGET / "release" / "isobath"))
# On a disk, not in memory: io_uring on tmpfs goes through worker threads.
WORK = Path(os.environ.get("ISOBATH_BENCH_DIR", ROOT / "target" / "bench"))

PACKAGES = {
    "fio": "fio",
    "nbdkit": "nbdkit",
    "qemu-img": "qemu-utils",
    "qemu-nbd": "qemu-utils",
}


def require_all():
    """Ends the run with a clear message where a program is missing."""
    missing = sorted({PACKAGES[name] for name in PACKAGES if not shutil.which(name)})
    if missing:
        sys.exit(f"bench: install what is missing: apt-get install {' '.join(missing)}")
    if not ISOBATH.exists():
        sys.exit(f"bench: {ISOBATH} is not there: make build")
    WORK.mkdir(parents=True, exist_ok=True)


def run(*command, **options):
    """Runs a command and gives its output; its error text ends the benchmark."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def version(*command):
    """The first line that a program prints of its own version."""
    return run(*command).splitlines()[0]
