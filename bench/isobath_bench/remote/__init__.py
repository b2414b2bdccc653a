"""Parts of the scenario `remote`, and what they share: the store behind its link, chains in it, servers of these."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request

from .. import servers, tools

# The link: seconds to the first byte of each answer, and bytes a second of all bodies together.
LATENCY, RATE = 0.03, 100 << 20
BUCKET = "bench"
# The objects of chains that are kept for later runs.
KEPT = tools.WORK / "remote-store"


class Store:
    """The running store, with its objects in a directory; one that is `near` has no link."""

    def __init__(self, directory=KEPT, near=False):
        link = [] if near else ["--latency", LATENCY, "--rate", RATE]
        command = [sys.executable, "-m", "isobath_bench.remote.store", directory, *link]
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=tools.ROOT / "bench", stdout=subprocess.PIPE, text=True
        )
        port = self.process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise tools.Failed("the store did not start")
        self.endpoint = f"http://127.0.0.1:{port}"
        # What the caller has of these counts as missing if it is empty.
        own = {name: "" for name in os.environ if name.startswith("AWS_")}
        self.environment = own | {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "nowhere",
            "NO_PROXY": "127.0.0.1",
        }

    def run(self, *command):
        """Runs isobath, which reaches the store."""
        return tools.run(tools.ISOBATH, *command, env=os.environ | self.environment)

    def serve(self, address, cache, *options, socket="isobath"):
        """Serves a chain in the store."""
        return servers.isobath(address, "--cache-dir", cache, *options, socket=socket, environment=self.environment)

    def taken(self):
        """What the store has counted since the last time: the requests, also those for layers, and bytes of bodies."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self.endpoint}/-/counts") as answer:
            counts = json.load(answer)
        requests = counts["requests"]
        return {
            "requests": sum(requests.values()),
            "of_layers": requests.get("GET layers", 0),
            "by_kind": requests,
            "fetched": counts["fetched"],
            "sent": counts["sent"],
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


def manifest_of(name, directory=KEPT):
    """The file of a chain's manifest."""
    return directory / BUCKET / "manifests" / f"{name}.json"


def pushed(active, directory=KEPT, suffix=""):
    """The name in the store of a chain that is kept for later runs; pushed unless it is there as it is now."""
    name = active.parent.name + suffix
    address = f"s3://{BUCKET}/{name}"
    # The manifest comes last, and so does the active layer of a chain that is built again.
    manifest = manifest_of(name, directory)
    if not manifest.exists() or manifest.stat().st_mtime <= active.stat().st_mtime:
        with Store(directory, near=True) as store:
            store.run("push", "-q", active, address)
    return address


def emptied(name):
    """A directory that is not there: for a cache, or for what a command makes."""
    path = tools.WORK / f"remote-{name}"
    shutil.rmtree(path, ignore_errors=True)
    return path


def link():
    """The link, for texts."""
    return f"{LATENCY * 1000:.0f} ms to the first byte of each answer, {RATE >> 20} MiB/s for all bodies together"
