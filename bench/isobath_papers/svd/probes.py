"""What stock QEMU does inside, by probes on functions that its programs export (bpftrace, as root)."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

from isobath_bench import tools

# How QEMU reads while it is probed: completions of io_uring that come in while a probe is stepped over can hang it.
AIO = "threads"
# QEMU's BlkdebugEvent: it announces that it loads an L2 table, reads data of a layer, passes a request to the layer
# below.
L2_LOAD, READ_DATA, READ_BACKING = 4, 9, 10
COUNTS = """
uprobe:{program}:qcow2_get_host_offset {{ @lookups = count(); }}
uprobe:{program}:bdrv_debug_event {{ @events[arg0, arg1] = count(); }}
"""
# From a request of the disk to the last time that a layer's file is read for it, which is for its data.
LOOKUP_TIMES = """
uprobe:{program}:blk_co_pread {{ if (@begin) {{ printf("%d ", @last - @begin); }} @begin = nsecs; }}
uprobe:{program}:luring_co_submit {{ @last = nsecs; }}
uprobe:{program}:thread_pool_submit_co {{ @last = nsecs; }}
"""
# In QEMU's structure of a node its file's name comes first among the names in it.
NODE_BYTES = 16384
LAYER = re.compile(rb"layer-(\d{5})\.qcow2\0")


class Probe:
    """Probes on a process; `printed` and `maps` are there when it has ended."""

    def __init__(self):
        self.printed = ""
        self.maps = {}


@contextlib.contextmanager
def probing(script, process):
    """Probes on a process of QEMU's, while the context lasts."""
    if not shutil.which("bpftrace"):
        raise tools.Failed("bpftrace is missing: apt-get install bpftrace")
    program = os.readlink(f"/proc/{process}/exe")
    output = tools.WORK / f"probes-{os.getpid()}.json"
    with open(output, "w+") as out:
        tracer = subprocess.Popen(
            ["bpftrace", "-f", "json", "-p", str(process), "-e", script.format(program=program)],
            stdout=out, stderr=subprocess.PIPE, text=True, env=os.environ | {"BPFTRACE_MAP_KEYS_MAX": "16384"},
        )  # fmt: skip
        probe = Probe()
        try:
            wait_for(tracer, output)
            yield probe
        finally:
            end(tracer)
        written = output.read_text()
        output.unlink()
        for line in written.splitlines():
            message = json.loads(line) if line.strip() else {}
            if message.get("type") == "printf":
                probe.printed += message["data"]
            elif message.get("type") == "map":
                probe.maps.update(message["data"])


def end(tracer, patience=120):
    """Has the probes taken away, and what they counted written."""
    tracer.send_signal(signal.SIGINT)
    try:
        tracer.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        tracer.kill()
        tracer.communicate()


def wait_for(tracer, output, patience=30):
    """Waits until the probes are there."""
    until = time.monotonic() + patience
    while "attached_probes" not in output.read_text():
        if tracer.poll() is not None or time.monotonic() > until:
            tracer.kill()
            raise tools.Failed(f"bpftrace did not start: {tracer.communicate()[1][-500:]}")
        time.sleep(0.01)
    time.sleep(0.3)


def layer_of(process, node):
    """Which layer of a generated chain a node of QEMU's is, counted from the base."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(node)
        found = LAYER.search(memory.read(NODE_BYTES))
    if not found:
        raise tools.Failed("a node of QEMU's has no layer's name where it is expected")
    return int(found.group(1))
