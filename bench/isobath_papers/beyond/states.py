"""States of a disk that a power loss may leave, and what a guest may find there.

A disk keeps what was written before its last flush, and writes that were to be durable by themselves (FUA). Of each
other write it may have any sectors: it writes none but whole, and promises no order.
"""

import struct
from dataclasses import dataclass, field
from functools import cache

from .nbd import SECTOR, Flush, Mark, Write

# What a power loss leaves of the writes that no flush has covered.
ALL, NONE, SOME, TORN = "all", "none", "some", "sectors"
KINDS = {
    ALL: "all of them, as of a storage without a volatile cache",
    NONE: "none",
    SOME: "each write or not, at random",
    TORN: "each sector of each write or not, at random",
}


@cache
def stamp(sector, request):
    """A sector's contents: where it belongs, and which request has written it (0: none, it was there before)."""
    return struct.pack(">4sIQ", b"SECT", sector, request) * (SECTOR // 16)


@dataclass(frozen=True)
class Request:
    """A request of the guest: a write of some sectors, or a flush (of no sectors)."""

    number: int
    sector: int = 0
    sectors: int = 0
    fua: bool = False

    @property
    def flush(self):
        return self.sectors == 0

    @property
    def range(self):
        return range(self.sector, self.sector + self.sectors)

    def data(self):
        return b"".join(stamp(sector, self.number) for sector in self.range)


def kept(disk, entries, cut, kind, random):
    """The disk when power is lost after `cut` entries of its log; `disk` is what it held before the first."""
    state = bytearray(disk)
    flushed = max((at for at in range(cut) if isinstance(entries[at], Flush)), default=0)
    for at, each in enumerate(entries[:cut]):
        if not isinstance(each, Write):
            continue
        if at < flushed or each.fua or kind == ALL or (kind == SOME and random.random() < 0.5):
            state[each.offset : each.offset + len(each.data)] = each.data
        elif kind == TORN:
            for start in range(0, len(each.data), SECTOR):
                if random.random() < 0.5:
                    state[each.offset + start : each.offset + start + SECTOR] = each.data[start : start + SECTOR]
    return state


@dataclass
class Found:
    """What the guest finds in one state, in sectors unless it says otherwise."""

    # Neither what they held when they were last flushed nor what was written since.
    wrong: int = 0
    # Of these: zeroes; what an earlier request had written before the last flush; anything else.
    zeroes: int = 0
    older: int = 0
    other: int = 0
    # Whose last write that was answered is gone, which a disk may do until it is flushed.
    rolled_back: int = 0
    # Which hold neither the last write that was answered nor the one before it, and no later one.
    two_back: int = 0
    # Requests that were answered, and of which some sectors are there and others are not.
    torn_requests: int = 0
    examples: list = field(default_factory=list)


class Guest:
    """What a guest has done to its disk, and what it was told. `first` is what the disk held before."""

    def __init__(self, requests, entries, first):
        self.requests = {each.number: each for each in requests}
        self.first = first
        self.begun, self.answered = {}, {}
        for at, each in enumerate(entries):
            if isinstance(each, Mark):
                (self.begun if each.begun else self.answered)[each.request] = at
        self.history = {}
        for each in requests:
            if each.number in self.begun:
                for sector in each.range:
                    self.history.setdefault(sector, []).append(each.number)

    def cuts(self, random, count):
        """Places of the log at which power is lost: half of them when a request was answered, half of them while a
        flush, or a write that is to be durable by itself, was under way. For the same random numbers the requests are
        the same whatever serves the disk."""
        syncs = [each.number for each in self.requests.values() if each.flush or each.fua]
        within = random.sample(syncs, min(count // 2, len(syncs)))
        after = random.sample(sorted(self.requests), count - len(within))
        found = [self.answered[each] + 1 for each in after]
        for each in within:
            begun, answered = self.begun[each], self.answered[each]
            found.append(begun + 1 + int((answered - begun) * random.random()))
        return sorted(found)

    def before(self, sector):
        """What a sector held before the first request."""
        return self.first[sector * SECTOR : (sector + 1) * SECTOR]

    def judge(self, contents, cut):
        """Compares the guest's disk with what it may hold when power was lost after `cut` entries."""
        found = Found()
        if len(contents) != len(self.first):
            raise ValueError(f"a disk of {len(contents)} bytes was read as {len(self.first)}")
        flushes = [
            self.begun[number] for number, at in self.answered.items() if at < cut and self.requests[number].flush
        ]
        flushed = max(flushes, default=0)
        there = {}
        for sector in range(len(contents) // SECTOR):
            data = contents[sector * SECTOR : (sector + 1) * SECTOR]
            # By their times; 0 is what was there before.
            versions = [0, *(number for number in self.history.get(sector, ()) if self.begun[number] < cut)]
            durable = last = 0
            for index, number in enumerate(versions):
                if number and self.answered.get(number, cut) < cut:
                    last = index
                    if self.answered[number] < flushed or self.requests[number].fua:
                        durable = index
            seen = self._version(sector, data, versions)
            if seen is None or seen < durable:
                self._wrong(found, sector, data, seen, versions)
            else:
                found.rolled_back += seen < last
                found.two_back += seen < last - 1
            there[sector] = None if seen is None else versions[seen]
        found.torn_requests = sum(
            self._torn(self.requests[number], there, cut) for number, at in self.answered.items() if at < cut
        )
        return found

    def _version(self, sector, data, versions):
        """Which of its versions a sector holds, the newest if it may be several."""
        for index in reversed(range(len(versions))):
            if data == (stamp(sector, versions[index]) if index else self.before(sector)):
                return index
        return None

    def _torn(self, request, there, cut):
        """Whether some sectors of a request are there and others are not; those that a later one has overwritten, or
        may have, say nothing of it."""
        own = [
            there[sector] == request.number
            for sector in request.range
            if not any(later > request.number and self.begun[later] < cut for later in self.history[sector])
        ]
        return any(own) and not all(own)

    def _wrong(self, found, sector, data, seen, versions):
        found.wrong += 1
        zeroes = not any(data)
        found.zeroes += zeroes
        found.older += seen is not None and not zeroes
        found.other += seen is None and not zeroes
        if len(found.examples) < 4:
            what = "zeroes" if zeroes else data[:16].hex() if seen is None else f"request {versions[seen]}"
            found.examples.append(f"sector {sector}: {what}, and the guest has written it by {versions[1:]}")


def workload(random, sectors, count, in_flight):
    """Batches of requests that are sent together, and do not overlap: writes of a window that moves over the disk, and
    a flush now and then, by itself. Each has a number of its own, from 1."""
    batches, number, window = [], 0, min(sectors, 1536)
    while number < count:
        if random.random() < 0.1:
            number += 1
            batches.append([Request(number)])
            continue
        batch, taken = [], set()
        low = (sectors - window) * number // count
        for _ in range(random.randint(1, in_flight)):
            kind = random.random()
            if kind < 0.5:
                length, align = random.randint(1, 8), 1
            elif kind < 0.7:
                length, align = 8, 8
            elif kind < 0.9:
                length, align = random.randint(9, 200), 1
            else:
                length, align = 128, 128
            first = -(-(low + random.randrange(window - length)) // align) * align
            place = range(first, min(first + length, sectors))
            if taken.isdisjoint(place):
                taken |= set(place)
                number += 1
                batch.append(Request(number, first, len(place), random.random() < 0.06))
        batches.append(batch)
    return batches


def whole_clusters(flushes, between, sectors):
    """Batches of one request each: writes of whole clusters, one after the other, and a flush after some."""
    batches, cluster = [], 0
    for _ in range(flushes):
        for _ in range(between):
            batches.append([Request(len(batches) + 1, cluster * sectors, sectors)])
            cluster += 1
        batches.append([Request(len(batches) + 1)])
    return batches
