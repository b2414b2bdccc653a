"""What the parts of the scenario share."""

import json
import os
import resource
import shutil
import subprocess
import time

from isobath_bench import tools


def directory(name):
    """An empty directory to work in."""
    path = tools.WORK / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def measured(*command):
    """Runs a command in a warm cache; gives its time and processor time, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise tools.Failed(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu": cpu}


def generate(path, *options):
    """A chain in a directory; gives the active image."""
    return tools.run(tools.ISOBATH, "chain", "generate", *options, path).strip()


def backing_file(image):
    """The name of the backing file, as the image has it."""
    return json.loads(tools.run("qemu-img", "info", "-U", "--output=json", image))["backing-filename"]


def programs():
    """The programs compared, by name."""
    return {"isobath": tools.ISOBATH, "qemu-img": "qemu-img"}


def settle():
    """Lets what the last command wrote reach the disk, so that the next one does not wait for it."""
    os.sync()
