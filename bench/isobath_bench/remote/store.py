"""A small S3 server behind a link: every answer waits before its first byte, and all bodies share a rate.

    python3 -m isobath_bench.remote.store DIRECTORY [--latency SECONDS] [--rate BYTES]

It prints its port. An object is a file in the directory, which has one server at a time: BUCKET/KEY. `GET /-/counts`
answers with the requests by method and first part of the key, and with the bytes of bodies that were fetched and sent;
from then on it counts anew. That request itself neither waits nor counts.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

# Bytes of a body that pass the link at once.
CHUNK = 128 << 10


class Link:
    """What all bodies pass, at `rate` bytes a second together; in no time if that is 0."""

    def __init__(self, rate):
        self.rate, self.free, self.lock = rate, 0.0, threading.Lock()

    def carry(self, length):
        """Waits until so many bytes have passed, after those that came before."""
        if not self.rate:
            return
        with self.lock:
            self.free = max(self.free, time.monotonic()) + length / self.rate
            until = self.free
        time.sleep(max(0.0, until - time.monotonic()))


class Store(ThreadingHTTPServer):
    """The server, on a port of this machine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory, latency=0.0, rate=0):
        self.directory, self.latency, self.link = Path(directory), latency, Link(rate)
        # What is not an object, or not yet.
        self.work = self.directory / ".work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        self.counts = Counter()
        self.bodies = Counter()
        super().__init__(("127.0.0.1", 0), Handler)

    def carry(self, direction, length):
        """Lets a part of a body pass, which is `fetched` or `sent`."""
        self.link.carry(length)
        with self.lock:
            self.bodies[direction] += length

    def count(self, request):
        with self.lock:
            self.counts[request] += 1

    def taken(self):
        """What was counted since it was asked the last time."""
        with self.lock:
            taken = {"requests": self.counts, "fetched": self.bodies["fetched"], "sent": self.bodies["sent"]}
            self.counts, self.bodies = Counter(), Counter()
        return taken

    def new(self):
        """A name for a file, or for the parts of an upload."""
        return self.work / str(next(self.numbers))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def handle(self):
        # Clients are ended in the middle of an answer.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do(self):
        """Answers a request of any method."""
        target = urlsplit(self.path)
        self.key = unquote(target.path).strip("/")
        self.query = dict(parse_qsl(target.query, keep_blank_values=True))
        if self.key == "-/counts":
            return self.answer(200, json.dumps(self.server.taken()), counted=False)
        self.server.count(f"{self.command} {self.kind()}".strip())
        body = self.received() if self.command in ("PUT", "POST") else None
        time.sleep(self.server.latency)
        self.file = self.server.directory / self.key
        has = self.query.__contains__
        match self.command:
            case "GET" if has("list-type"):
                self.list()
            case "GET" | "HEAD":
                self.get()
            case "PUT" if has("uploadId"):
                self.put_part(body)
            case "PUT":
                self.put(body)
            case "POST" if has("uploads"):
                self.begin()
            case "POST" if has("uploadId"):
                self.join()
            case "POST" if has("delete"):
                self.delete_all(body.read_text())
            case "DELETE" if has("uploadId"):
                shutil.rmtree(self.upload(), ignore_errors=True)
                self.answer(204)
            case "DELETE":
                self.file.unlink(missing_ok=True)
                self.answer(204)
            case _:
                self.answer(405)
        if body:
            body.unlink(missing_ok=True)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def kind(self):
        """The first part of the key, which has no prefix."""
        return "".join(self.key.split("/")[1:2])

    def received(self):
        """A new file with the request's body."""
        new, left = self.server.new(), int(self.headers["Content-Length"] or 0)
        view = memoryview(bytearray(min(CHUNK, left)))
        with open(new, "wb", buffering=0) as file:
            while left:
                length = self.rfile.readinto(view[:left])
                if not length:
                    raise ConnectionResetError("the client left in the middle of a body")
                self.server.carry("sent", length)
                file.write(view[:length])
                left -= length
        return new

    def answer(self, status, body="", headers=None, counted=True):
        """Sends an answer whose body is a text."""
        body = body.encode()
        self.head(status, {"Content-Length": len(body)} | (headers or {}))
        if body and self.command != "HEAD":
            if counted:
                self.server.carry("fetched", len(body))
            self.wfile.write(body)

    def head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def missing(self):
        self.answer(404, "<Error><Code>NoSuchKey</Code></Error>")

    def get(self):
        try:
            file = open(self.file, "rb", buffering=0)
        except (FileNotFoundError, IsADirectoryError):
            return self.missing()
        with file:
            found = os.fstat(file.fileno())
            modified = formatdate(found.st_mtime, usegmt=True)
            headers = {"ETag": tag(found), "Last-Modified": modified, "Accept-Ranges": "bytes"}
            span = range_of(self.headers["Range"], found.st_size)
            if span is None:
                return self.answer(416, headers={"Content-Range": f"bytes */{found.st_size}"})
            first, end = span
            whole = self.headers["Range"] is None
            if not whole:
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{found.st_size}"
            self.head(200 if whole else 206, headers | {"Content-Length": end - first})
            if self.command == "GET":
                self.send(file, first, end)

    def send(self, file, at, end):
        while at < end:
            length = min(CHUNK, end - at)
            self.server.carry("fetched", length)
            until = at + length
            while at < until:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, until - at)

    def put(self, new):
        none, same = self.headers["If-None-Match"], self.headers["If-Match"]
        with self.server.lock:
            now = tag(self.file.stat()) if self.file.exists() else None
            refused = (none and now) or (same and same != now)
            if not refused:
                self.becomes(new)
        if refused:
            return self.answer(412, "<Error><Code>PreconditionFailed</Code></Error>")
        self.answer(200, headers={"ETag": self.tag})

    def becomes(self, new):
        """A file becomes the object."""
        self.tag = tag(new.stat())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new.rename(self.file)

    def upload(self):
        """Where the parts of an upload are."""
        return self.server.work / self.query["uploadId"]

    def begin(self):
        new = self.server.new()
        new.mkdir()
        result = "InitiateMultipartUploadResult"
        self.answer(200, f"<{result}><UploadId>{new.name}</UploadId></{result}>")

    def put_part(self, new):
        if not self.upload().is_dir():
            return self.missing()
        etag = tag(new.stat())
        new.rename(self.upload() / f"{int(self.query['partNumber']):05}")
        self.answer(200, headers={"ETag": etag})

    def join(self):
        """The parts of an upload become an object, in the order of their numbers."""
        if not self.upload().is_dir():
            return self.missing()
        new = self.server.new()
        with open(new, "wb") as whole:
            for part in sorted(self.upload().iterdir()):
                with open(part, "rb") as file:
                    while os.copy_file_range(file.fileno(), whole.fileno(), 1 << 30):
                        pass
        shutil.rmtree(self.upload())
        with self.server.lock:
            self.becomes(new)
        result = "CompleteMultipartUploadResult"
        self.answer(200, f"<{result}><ETag>{escape(self.tag)}</ETag></{result}>")

    def delete_all(self, text):
        keys = re.findall("<Key>(.*?)</Key>", text)
        for key in keys:
            (self.file / unescape(key)).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>")

    def list(self):
        prefix, found = self.query.get("prefix", ""), []
        for path in sorted(self.file.rglob("*")):
            key = path.relative_to(self.file).as_posix()
            if key.startswith(prefix) and path.is_file():
                about = path.stat()
                modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(about.st_mtime))
                found.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{about.st_size}</Size>"
                    f"<ETag>{escape(tag(about))}</ETag><LastModified>{modified}</LastModified></Contents>"
                )
        result = "ListBucketResult"
        self.answer(200, f"<{result}><IsTruncated>false</IsTruncated>{''.join(found)}</{result}>")


def tag(about):
    """The ETag of a file: an object is always a new file."""
    return f'"{about.st_ino:x}-{about.st_mtime_ns:x}-{about.st_size:x}"'


def range_of(header, size):
    """The bytes that a request asks for, as their beginning and end; `None` if there are none."""
    if header is None:
        return 0, size
    first, last = header.removeprefix("bytes=").split("-")
    if not first:
        return (max(0, size - int(last)), size) if int(last) and size else None
    end = min(size, int(last) + 1) if last else size
    return (int(first), end) if int(first) < end else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--rate", type=int, default=0, help="bytes a second of all bodies together")
    arguments = parser.parse_args()
    store = Store(arguments.directory, arguments.latency, arguments.rate)
    print(store.server_port, flush=True)
    store.serve_forever()


if __name__ == "__main__":
    main()
