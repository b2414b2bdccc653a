"""What is counted beyond the papers: states of a power loss and what is found in them, the recorder, the model, the
fleet. No image is served."""

import contextlib
import io
import json
import socket as sockets
import struct
import sys
import tempfile
import unittest
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import Random
from unittest import mock

from isobath_bench import tools
from isobath_papers import plan, record
from isobath_papers.beyond import fleet, nbd, scale, states
from isobath_papers.beyond.nbd import FLUSH, SECTOR, WRITE, Flush, Mark, Write
from isobath_papers.beyond.states import ALL, KINDS, NONE, TORN, Request, stamp

OLD = b"".join(stamp(sector, 0) for sector in range(8))


def written(request, answered=True):
    """The log of a write."""
    marks = [Mark(request.number, True), Write(request.sector * SECTOR, request.data(), request.fua)]
    return [*marks, Mark(request.number, False)] if answered else marks


def flushed(number):
    return [Mark(number, True), Flush(), Mark(number, False)]


def judged(requests, entries, contents, cut=None):
    return states.Guest(requests, entries, OLD).judge(bytes(contents), len(entries) if cut is None else cut)


def changed(contents, sector, data):
    return contents[: sector * SECTOR] + data + contents[(sector + 1) * SECTOR :]


class States(unittest.TestCase):
    def setUp(self):
        self.first, self.second = Request(1, 0, 2), Request(3, 1, 4)
        self.entries = [*written(self.first), *flushed(2), *written(self.second)]

    def kept(self, kind, seed=1, entries=None):
        entries = entries or self.entries
        return states.kept(OLD, entries, len(entries), kind, Random(seed))

    def test_what_was_flushed_is_in_every_state(self):
        for kind in KINDS:
            for seed in range(20):
                self.assertEqual(self.kept(kind, seed)[:SECTOR], stamp(0, 1), kind)

    def test_what_was_durable_by_itself_is_in_every_state(self):
        entries = [*written(Request(1, 0, 2)), *written(Request(2, 4, 2, fua=True))]
        for kind in KINDS:
            state = self.kept(kind, entries=entries)
            self.assertEqual(state[4 * SECTOR : 6 * SECTOR], stamp(4, 2) + stamp(5, 2), kind)
        self.assertEqual(self.kept(NONE, entries=entries)[: 2 * SECTOR], OLD[: 2 * SECTOR])

    def test_a_storage_that_loses_nothing_has_all_writes(self):
        self.assertEqual(self.kept(ALL)[SECTOR : 5 * SECTOR], self.second.data())

    def test_sectors_are_written_whole_or_not_at_all_in_any_choice(self):
        seen = set()
        for seed in range(200):
            state = self.kept(TORN, seed)
            for sector in range(1, 5):
                self.assertIn(bytes(state[sector * SECTOR :][:SECTOR]), (self.old(sector), stamp(sector, 3)))
            seen.add(bytes(state))
        self.assertEqual(len(seen), 16)

    def old(self, sector):
        return stamp(sector, 1 if sector < 2 else 0)

    def test_a_disk_that_loses_only_what_it_may_is_never_wrong(self):
        random = Random(7)
        batches = states.workload(Random(3), 4096, 120, 4)
        requests, entries = [each for batch in batches for each in batch], []
        for each in requests:
            entries += flushed(each.number) if each.flush else written(each)
        first = b"".join(stamp(sector, 0) for sector in range(4096))
        guest = states.Guest(requests, entries, first)
        for cut in guest.cuts(random, 6):
            for kind in KINDS:
                found = guest.judge(states.kept(first, entries, cut, kind, random), cut)
                self.assertEqual((found.wrong, found.examples), (0, []))
                if kind == ALL:
                    self.assertEqual(found, states.Found())

    def test_whole_clusters_are_written_side_by_side_with_a_flush_after_some(self):
        batches = states.whole_clusters(2, 3, 128)
        self.assertEqual([[each.number for each in batch] for batch in batches], [[at] for at in range(1, 9)])
        self.assertEqual([each.sector for [each] in batches if not each.flush], [at * 128 for at in range(6)])
        self.assertEqual([each.number for [each] in batches if each.flush], [4, 8])


class Judgement(unittest.TestCase):
    def test_what_was_flushed_must_be_there(self):
        request = Request(1, 2, 1)
        entries = [*written(request), *flushed(2)]
        for data, field in ((bytes(SECTOR), "zeroes"), (stamp(2, 0), "older"), (b"STALE   " * 64, "other")):
            found = judged([request, Request(2)], entries, changed(OLD, 2, data))
            self.assertEqual((found.wrong, getattr(found, field)), (1, 1), field)
            self.assertEqual(found.zeroes + found.older + found.other, 1)

    def test_what_was_not_flushed_may_be_gone_and_is_counted(self):
        requests = [Request(1, 2, 1), Request(2, 2, 1)]
        entries = [*written(requests[0]), *written(requests[1])]
        found = [judged(requests, entries, changed(OLD, 2, stamp(2, number))) for number in range(3)]
        self.assertEqual([each.wrong for each in found], [0, 0, 0])
        self.assertEqual([each.rolled_back for each in found], [1, 1, 0])
        self.assertEqual([each.two_back for each in found], [1, 0, 0])

    def test_a_write_under_way_may_be_there_and_one_that_was_not_sent_may_not(self):
        request = Request(1, 2, 1)
        entries = written(request, answered=False)
        there = changed(OLD, 2, stamp(2, 1))
        self.assertEqual(judged([request], entries, there).wrong, 0)
        self.assertEqual(judged([request], entries, there, cut=0).wrong, 1)

    def test_a_flush_covers_what_was_answered_before_it_was_sent_and_nothing_else(self):
        early, late = Request(1, 2, 1), Request(2, 4, 1)
        entries = [*written(early), Mark(3, True), *written(late), Flush(), Mark(3, False)]
        requests = [early, late, Request(3)]
        self.assertEqual(judged(requests, entries, changed(OLD, 2, stamp(2, 1))).wrong, 0)
        self.assertEqual(judged(requests, entries, changed(OLD, 4, stamp(4, 2))).older, 1)
        # Before it is answered it promises nothing.
        self.assertEqual(judged(requests, entries, OLD, cut=len(entries) - 1).wrong, 0)

    def test_a_write_that_is_to_be_durable_by_itself_must_be_there_once_it_was_answered(self):
        request = Request(1, 2, 1, fua=True)
        entries = written(request)
        self.assertEqual(judged([request], entries, OLD).older, 1)
        self.assertEqual(judged([request], entries, OLD, cut=len(entries) - 1).wrong, 0)

    def test_what_was_never_written_must_be_as_it_was(self):
        self.assertEqual(judged([], [Mark(9, True)], changed(OLD, 5, stamp(4, 0))).other, 1)

    def test_a_request_is_torn_where_a_part_of_it_is_there(self):
        requests = [Request(1, 2, 3), Request(2, 4, 1)]
        entries = [*written(requests[0]), *written(requests[1])]
        half = changed(OLD, 2, stamp(2, 1))
        self.assertEqual(judged(requests, entries, half).torn_requests, 1)
        # Sector 4 says nothing of the first request: the second may have overwritten it.
        self.assertEqual(judged(requests, entries, changed(half, 3, stamp(3, 1))).torn_requests, 0)

    def test_a_disk_of_another_length_is_an_error(self):
        self.assertRaises(ValueError, judged, [], [], OLD[:-SECTOR])


class Protocol(unittest.TestCase):
    def setUp(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        self.device = self.enterContext(nbd.Recorder(OLD, Path(directory) / "nbd.sock"))

    def client(self):
        return nbd.Client(self.device.path)

    def test_writes_and_flushes_are_recorded_in_their_order(self):
        with self.client() as client:
            self.assertEqual(client.size, len(OLD))
            for handle, data, fua in ((1, stamp(3, 1), False), (2, stamp(4, 2), True)):
                client.send(handle, WRITE, (handle + 2) * SECTOR, data=data, fua=fua)
            client.send(3, FLUSH)
            client.send(4, nbd.WRITE_ZEROES, 0, SECTOR)
            self.assertEqual([client.answered() for _ in range(4)], [1, 2, 3, 4])
        self.assertEqual(
            self.device.log.entries,
            [
                Write(3 * SECTOR, stamp(3, 1), False),
                Write(4 * SECTOR, stamp(4, 2), True),
                Flush(),
                Write(0, bytes(SECTOR), False),
            ],
        )
        self.assertEqual(self.device.disk[: 4 * SECTOR], bytes(SECTOR) + OLD[SECTOR : 3 * SECTOR] + stamp(3, 1))

    def test_requests_that_do_not_fit_fail_and_change_nothing(self):
        with self.client() as client:
            for kind, offset, length in (
                (WRITE, len(OLD) - SECTOR, 2 * SECTOR),
                (WRITE, 1, SECTOR),
                (WRITE, 0, SECTOR - 1),
                (WRITE, 1 << 63, SECTOR),
                (nbd.TRIM, 0, len(OLD) + SECTOR),
                (99, 0, 0),
            ):
                client.send(7, kind, offset, length, data=bytes(length) if kind == WRITE else b"")
                self.assertRaises(nbd.Refused, client.answered)
        self.assertEqual((self.device.log.entries, self.device.disk), ([], OLD))

    def test_a_client_that_is_not_one_is_hung_up_on(self):
        for sent in (
            struct.pack(">I", 3) + b"NOTMAGIC" + bytes(8),
            struct.pack(">I8sII", 3, nbd.OPTION, nbd.GO, 1 << 31),
        ):
            with sockets.socket(sockets.AF_UNIX) as client:
                client.connect(str(self.device.path))
                nbd.receive(client, 18)
                client.sendall(sent)
                self.assertEqual(client.recv(1), b"")


class Model(unittest.TestCase):
    def test_a_line_through_two_sizes_goes_on_as_a_line(self):
        line = scale.Line((10, 150), (30, 350))
        self.assertEqual((line.constant, line.each, line.at(65_000)), (50, 10, 650_050))

    def test_of_a_trace_calls_are_counted_once_and_bytes_where_they_were_read(self):
        trace = "\n".join(
            [
                '12 openat(AT_FDCWD, "a.qcow2", O_RDONLY) = 4',
                "12 preadv2(4,  <unfinished ...>",
                "13 futex(0x1, FUTEX_WAKE, 1) = 1",
                '12 <... preadv2 resumed>[{iov_base="QFI"}], 1, 0, 0) = 4096',
                '12 pread64(4, "", 512, 0) = 0',
                '12 openat(AT_FDCWD, "b", O_RDONLY) = -1 ENOENT (No such file or directory)',
                "12 +++ exited with 0 +++",
            ]
        )
        with tempfile.TemporaryDirectory() as directory:
            active = Path(directory) / "a.qcow2"
            with mock.patch.object(tools, "run", lambda *words, **_: Path(words[3]).write_text(trace)):
                found = scale.opened(scale.OURS, active)
        self.assertEqual(found, {"calls": 4, "reads": 2, "bytes_read": 4096})

    def test_each_line_has_two_sizes_and_three_that_it_predicts(self):
        for key, (given, predicted) in scale.SIZES.items():
            self.assertEqual((len(set(given)), len(set(predicted) - set(given))), (2, 3), key)


class Fleet(unittest.TestCase):
    def test_the_fleet_is_as_long_as_the_paper_says(self):
        drawn = fleet.lengths(Random(fleet.SEED), 4000)
        shares = [(length, count, length * count) for length, count in Counter(drawn).items()]
        for low, high, chains, files in ((1, 10, 0.8, 0.5), (30, 35, 0.1, 0.25)):
            self.assertAlmostEqual(fleet.part(shares, low, high, 1), chains, delta=chains / 10)
            self.assertAlmostEqual(fleet.part(shares, low, high, 2), files, delta=files / 10)

    def test_a_picture_is_one_chart_of_the_page_without_what_a_script_needs(self):
        page = (
            '<figure id="a"><p>nothing</p></figure>\n<figure id="b"><svg viewBox="0 0 640 300" role="img">'
            '<path class="line s0" d="M0 1" data-points="[1, 2]" data-name="x"/></svg></figure>'
        )
        picture = fleet.picture(page, "b")
        self.assertIn('<path class="line s0" d="M0 1"/>', picture)
        self.assertIn('viewBox="0 0 640 300"', picture)
        for name in ("a", "c"):
            self.assertRaises(tools.Failed, fleet.picture, page, name)


class Kept(unittest.TestCase):
    """What is of no paper is run and kept by itself."""

    def setUp(self):
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(record, "RUNS", directory / "runs"))
        self.enterContext(mock.patch.object(record, "KEPT", directory / "kept"))
        began = iter(range(9))
        self.enterContext(mock.patch.object(record, "about", lambda profile: {"began": next(began)}))
        self.enterContext(mock.patch.object(record, "program", lambda: "a build"))
        record.KEPT.mkdir()
        self.module = mock.Mock(NAME="one", points=lambda profile: [plan.Point(("a",)), plan.Point(("b",))])
        self.experiment = plan.Experiment("beyond", self.module)
        self.run_of = record.Beyond(plan.Profile(False, 1), [self.experiment])

    def add(self, key, sample):
        self.run_of.add(self.experiment, plan.Point((key,)), 0, 1.0, sample)

    def began(self):
        return json.loads(record.machine_of(self.run_of.directory, self.experiment).read_text())["began"]

    def test_a_run_goes_on_where_it_ended_and_one_that_was_through_begins_anew(self):
        self.run_of.begin(False)
        self.add("a", {"wrong": 0})
        self.run_of.begin(False)
        self.assertEqual(len(self.run_of.records(self.experiment)), 1)
        self.add("b", {"failed": "failed", "why": ""})
        self.run_of.begin(False)
        self.assertEqual(len(self.run_of.records(self.experiment)), 2)
        self.add("b", {"wrong": 0})
        self.assertEqual(self.began(), 0)
        self.run_of.begin(False)
        self.assertEqual(self.run_of.records(self.experiment), [])
        self.assertEqual(self.began(), 3)

    def test_only_its_own_lines_are_replaced(self):
        for name in ("svd.dd.jsonl", "machine.json", "beyond.other.jsonl", "beyond.one.jsonl"):
            (record.KEPT / name).write_text("as before")
        self.run_of.begin(False)
        self.add("a", {"wrong": 0})
        self.run_of.end()
        kept = {path.name: path.read_text() == "as before" for path in record.KEPT.iterdir()}
        self.assertEqual(
            kept,
            {
                "svd.dd.jsonl": True,
                "machine.json": True,
                "beyond.other.jsonl": True,
                "beyond.one.jsonl": False,
                "beyond.one.machine.json": False,
            },
        )

    def test_a_run_of_the_papers_leaves_it_alone(self):
        for name in ("svd.gone.jsonl", "beyond.one.jsonl"):
            (record.KEPT / name).write_text("as before")
        papers = record.Run(plan.Profile(False, 3))
        papers.begin(False)
        papers.end()
        self.assertEqual(sorted(path.name for path in record.KEPT.iterdir()), ["beyond.one.jsonl", "machine.json"])

    def test_it_is_named_by_itself(self):
        loader = SourceFileLoader("papers", str(Path(__file__).parents[1] / "papers"))
        program, said = module_from_spec(spec_from_loader("papers", loader)), io.StringIO()
        with (
            mock.patch.object(sys, "path", list(sys.path)),
            mock.patch.object(sys, "argv", ["papers", "beyond", "svd.dd"]),
            mock.patch.object(sys, "dont_write_bytecode", True),
            contextlib.redirect_stderr(said),
            self.assertRaises(SystemExit) as ended,
        ):
            loader.exec_module(program)
            with mock.patch.object(program.tools, "require_all"):
                program.main()
        self.assertEqual(ended.exception.code, 2)
        self.assertIn("name what no paper measures by itself", said.getvalue())
