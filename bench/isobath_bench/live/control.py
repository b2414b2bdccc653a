"""QMP: what a server is told while it serves."""

import json
import socket as sockets
import time

from .. import tools

ENDED = ("BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED")


class Qmp:
    """A connection to a server's control socket."""

    def __init__(self, path, patience=60):
        self.socket = sockets.socket(sockets.AF_UNIX)
        until = time.monotonic() + patience
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionError) as error:
                if time.monotonic() > until:
                    raise tools.Failed(f"{path}: nobody listens") from error
                time.sleep(0.002)
        self.received = b""
        self.events = []
        self._next()
        self.do("qmp_capabilities")

    def _next(self, seconds=None):
        """The next message, or `None` if there is none for some seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self.received:
            if until is not None:
                self.socket.settimeout(max(until - time.monotonic(), 0.001))
            try:
                more = self.socket.recv(1 << 20)
            except TimeoutError:
                return None
            finally:
                self.socket.settimeout(None)
            if not more:
                raise tools.Failed("the server has closed its control socket")
            self.received += more
        line, self.received = self.received.split(b"\n", 1)
        return json.loads(line)

    def do(self, command, **arguments):
        """Has a command done, and gives what it returns. Names are written with `_` for `-`."""
        arguments = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            message = self._next()
            if "event" in message:
                self.events.append(message)
            elif "error" in message:
                raise tools.Failed(f"{command}: {message['error']['desc']}")
            else:
                return message["return"]

    def wait_for_job(self, seconds):
        """Waits until a job has ended; gives its event, or `None` if that takes longer than some seconds."""
        until = time.monotonic() + seconds
        while True:
            for event in self.events:
                if event["event"] in ENDED:
                    self.events.remove(event)
                    if event["event"] == ENDED[1] or "error" in event["data"]:
                        raise tools.Failed(f"the job failed: {event['data'].get('error', 'cancelled')}")
                    return event
            left = until - time.monotonic()
            message = self._next(left) if left > 0 else None
            if message is None:
                return None
            self.events.append(message)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
