"""What a guest's file system sends to its disk under an application, recorded once on a loop device."""

import contextlib
import json
import os
import random
import re
import shutil
import sqlite3
import threading

from .. import tools
from . import counts, log, mounts

EVENT = "block/block_rq_issue"
# "dev FLAGS bytes () sector + sectors"; a flush has no sectors.
LINE = re.compile(r" block_rq_issue: \d+,\d+ (\S+) \d+ \(\S*\) (\d+) \+ (\d+) ")
CLIENTS = 8


def scale(count):
    return count // 20 if tools.QUICK else count


def mail_files(directory):
    for number in range(scale(1000)):
        (directory / f"mail-{number}").write_bytes(os.urandom(random.Random(number).randint(1, 32) << 10))


def mail(directory):
    """As filebench's varmail: files deleted; made, appended and synced; read, appended and synced."""

    def client(name):
        choice = random.Random(name)
        for _ in range(scale(250)):
            one, other = (directory / f"mail-{choice.randrange(scale(1000))}" for _ in range(2))
            one.unlink(missing_ok=True)
            for path in (one, other):
                with open(path, "ab") as file:
                    file.write(choice.randbytes(choice.randint(1, 32) << 10))
                    file.flush()
                    os.fsync(file.fileno())
            other.read_bytes()

    clients = [threading.Thread(target=client, args=(f"client {number}",)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def database(directory, mode="wal"):
    base = sqlite3.connect(directory / "base.db", isolation_level=None)
    base.execute(f"pragma journal_mode={mode}")
    base.execute("pragma synchronous=full")
    return base


def tables(directory):
    with contextlib.closing(database(directory)) as base:
        base.execute("create table account (id integer primary key, balance integer, filler text)")
        base.execute("create table history (id integer primary key, account integer, change integer, at text)")
        base.execute("begin")
        rows = ((number, 0, "x" * 200) for number in range(scale(100_000)))
        base.executemany("insert into account values (?, ?, ?)", rows)
        base.execute("commit")


def transactions(directory):
    """Transfers between accounts, noted in a history, each committed durably."""
    choice = random.Random(1)
    for mode, count in (("wal", scale(1500)), ("delete", scale(500))):
        with contextlib.closing(database(directory, mode)) as base:
            for number in range(count):
                base.execute("begin immediate")
                change = choice.randint(1, 100)
                for sign in (1, -1):
                    account = choice.randrange(scale(100_000))
                    base.execute("update account set balance = balance + ? where id = ?", (sign * change, account))
                    base.execute(
                        "insert into history (account, change, at) values (?, ?, ?)",
                        (account, sign * change, f"t{number}"),
                    )
                base.execute("commit")


# What fills the disk before, and what is recorded.
APPLICATIONS = {
    "mail server, as varmail": (mail_files, mail),
    "database, SQLite": (tables, transactions),
}


def recorded(name, size):
    """The disk as the application found it (a raw file), and the requests it became; kept for later runs."""
    directory = tools.WORK / f"flush-trace-{name.split()[0]}-{size >> 20}M{'-quick' * tools.QUICK}"
    disk, trace, done = directory / "disk.raw", directory / "trace.json", directory / "done"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        prepare, work = APPLICATIONS[name]
        tools.run("truncate", f"--size={size}", disk)
        with mounts.attached(disk, make=mounts.KINDS["ext4"][0]) as (_, mount):
            prepare(mount)
        copy = directory / "recording.raw"
        shutil.copyfile(disk, copy)
        with mounts.attached(copy) as (device, mount):
            before = counts.requests(device)
            steps = record(device, lambda: (work(mount), tools.run("sync", "--file-system", mount)))
            flushes = (counts.requests(device) - before)["flushes"]
        copy.unlink()
        if flushes != sum(what == "sync" for what, *_ in steps):
            raise tools.Failed(f"{name}: {flushes} flushes reached the device, {len(steps)} requests were recorded")
        trace.write_text(json.dumps(steps))
        done.touch()
    return disk, [tuple(step) for step in json.loads(trace.read_text())]


def record(device, work):
    """The writes and flushes that a device is sent while `work` runs, in order, as steps of an I/O log."""
    with counts.tracing() as instance:
        (instance / "buffer_size_kb").write_text("32768\n")
        event = instance / "events" / EVENT
        (event / "filter").write_text(f"dev == {counts.kernel_number(device)}\n")
        (event / "enable").write_text("1\n")
        work()
        (event / "enable").write_text("0\n")
        counts.check_complete(instance)
        steps = []
        for flags, sector, sectors in LINE.findall((instance / "trace").read_text()):
            if int(sectors) and "W" in flags:
                steps.append(("write", int(sector) * 512, int(sectors) * 512))
            elif flags.startswith("F"):
                steps.append(log.SYNC)
    return steps
