"""How often is measured, and what a busy machine does to it. Clock, machine and measurements are made up."""

import contextlib
import io
import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from isobath_papers import plan, quiet, record, runner
from isobath_papers.plan import Experiment, Point, Profile
from isobath_papers.verdict import compared

FAR, CLOSE, QEMU, COUNTED = (("far",), ("close",), ("QEMU",), ("counted",))
SPEED = {FAR: 30.0, CLOSE: 21.0, QEMU: 10.0, COUNTED: 20.0}
FULL = Profile(False, plan.ROUNDS, plan.CLOSE_ROUNDS - plan.ROUNDS)


class Machine:
    """A machine whose time passes when it is slept on or measured on. `steal` is the part of it that the host takes."""

    def __init__(self):
        self.time, self.total, self.stolen = 0.0, 0, 0
        self.steal, self.others, self.times = 0.0, 0, [0.1]
        self.probed = 0

    def pass_by(self, seconds):
        self.time += seconds
        self.total += round(seconds * 1000)
        self.stolen += round(seconds * 1000 * self.steal)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.pass_by(seconds)

    def ticks(self):
        return quiet.Ticks(self.total, self.stolen)

    def running(self):
        return self.others

    def disk(self):
        self.probed += 1
        return self.times[self.probed % len(self.times)]


class Paper:
    """An experiment of four points; `during(number of the measurement, work)` is what happens meanwhile."""

    NAME, TITLE, SOURCE = "experiment", "An experiment", "a paper"

    def __init__(self, machine):
        self.machine = machine
        self.measured = []
        self.during = lambda count, key: None

    def points(self, profile):
        return [Point(FAR), Point(CLOSE), Point(QEMU), Point(COUNTED, once=True)]

    def measure(self, setting, point, number):
        self.measured.append((number, point.key))
        self.machine.pass_by(10)
        self.during(len(self.measured), point.key)
        return {"speed": SPEED[point.key], "measurement": len(self.measured)}

    def section(self, results):
        verdicts = [compared(results, str(one), 2.0, one, QEMU, "speed") for one in (FAR, CLOSE, COUNTED)]
        return SimpleNamespace(verdicts=verdicts)


class Rounds(unittest.TestCase):
    def setUp(self):
        self.machine = Machine()
        self.paper = Paper(self.machine)
        self.experiment = Experiment("paper", self.paper)
        self.watch = quiet.Watch(self.machine)
        directory = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.object(record, "RUNS", Path(directory)))
        self.enterContext(mock.patch.object(record, "program", lambda: "a build"))
        self.said = self.enterContext(contextlib.redirect_stderr(io.StringIO()))
        self.kept = record.Run(FULL)
        self.kept.directory.mkdir(parents=True)

    def run_it(self, profile=FULL):
        return runner.run([self.experiment], profile, self.kept, self.watch)

    def rounds_of(self, key):
        return [number for number, each in self.paper.measured if each == key]

    def discarded(self):
        return record.discarded(self.kept.path(self.experiment))

    def test_there_are_three_rounds_and_five_of_what_is_within_a_tenth_of_the_papers(self):
        self.assertEqual(self.run_it(), 0)
        self.assertEqual(self.rounds_of(FAR), [0, 1, 2])
        self.assertEqual(self.rounds_of(CLOSE), [0, 1, 2, 3, 4])
        self.assertEqual(self.rounds_of(QEMU), [0, 1, 2, 3, 4])
        self.assertEqual(self.discarded(), [])

    def test_what_is_counted_is_measured_once_however_close_it_is(self):
        self.run_it()
        self.assertEqual(self.rounds_of(COUNTED), [0])

    def test_so_many_rounds_as_are_asked_for(self):
        self.run_it(Profile(False, 4))
        self.assertEqual(self.rounds_of(CLOSE), [0, 1, 2, 3])

    def test_nothing_is_measured_twice_by_a_run_that_goes_on(self):
        self.run_it()
        measured = len(self.paper.measured)
        self.run_it()
        self.assertEqual(len(self.paper.measured), measured)

    def test_what_further_rounds_find_does_not_change_who_has_them(self):
        def during(count, key):
            number = self.paper.measured[-1][0]
            if number == 4 and interrupted == []:
                interrupted.append(count)
                raise KeyboardInterrupt
            # The median of the first three is close to 20, that of the first four is not.
            SPEED[CLOSE] = [20.0, 21.5, 23.0, 50.0, 50.0][number]

        interrupted = []
        self.paper.during = during
        with mock.patch.dict(SPEED):
            self.assertRaises(KeyboardInterrupt, self.run_it)
            self.run_it()
        self.assertEqual(sorted(set(self.rounds_of(CLOSE))), [0, 1, 2, 3, 4])
        rounds = [each["round"] for each in self.kept.records(self.experiment) if each["key"] == ["close"]]
        self.assertEqual(sorted(rounds), [0, 1, 2, 3, 4])

    def test_a_run_waits_until_the_machine_is_quiet(self):
        for name, busy, calm in (("others", 2, 0), ("steal", 0.1, 0.0), ("times", [0.1, 0.4], [0.1])):
            with self.subTest(name):
                machine = Machine()
                setattr(machine, name, busy)
                waits = []

                def note(text, machine=machine, name=name, calm=calm, waits=waits):
                    waits.append(text)
                    if len(waits) == 3:
                        setattr(machine, name, calm)

                quiet.Watch(machine).wait(note)
                self.assertEqual(len(waits), 3)
                self.assertGreaterEqual(machine.now(), 3 * quiet.PAUSE)

    def test_a_run_ends_without_a_measurement_if_the_machine_stays_busy(self):
        self.machine.others = 3
        with self.assertRaisesRegex(quiet.Busy, "busy for 15 minutes: 3.0 processes of others"):
            self.run_it()
        self.assertGreaterEqual(self.machine.now(), quiet.LIMIT)
        self.assertEqual(self.paper.measured, [])

    def throws_away(self, begin, end, why):
        """A round in whose second measurement something begins, and ends with the round, is measured again."""

        def during(count, key):
            if count == 2:
                begin()
            elif count == 5:
                self.assertRegex(self.discarded()[0]["discarded"], why)

        def note(text):
            if "thrown away" in text or "waits" in text:
                end()

        class Progress(runner.Progress):
            def note(self, text):
                note(text)

            def close(self):
                # A round that is measured again is one step of the way.
                test.assertEqual(self.done, self.total)

        test, self.paper.during = self, during
        with mock.patch.object(runner, "Progress", Progress):
            self.assertEqual(self.run_it(), 0)
        self.assertEqual(self.rounds_of(FAR), [0, 0, 1, 2])
        [found] = self.discarded()
        self.assertEqual(found["round"], 0)
        self.assertEqual(sorted(map(tuple, found["keys"])), sorted(SPEED))
        # What was thrown away stays in the file, and does not count.
        lines = [each for each in record.read(self.kept.path(self.experiment)) if "sample" in each]
        self.assertEqual(len(lines), len(self.paper.measured))
        first = [each["sample"]["measurement"] for each in self.kept.records(self.experiment) if each["round"] == 0]
        self.assertEqual(sorted(first), [5, 6, 7, 8])

    def test_a_round_does_not_count_in_which_the_host_took_the_processors(self):
        def begin():
            self.machine.steal = 0.2

        def end():
            self.machine.steal = 0.0

        self.throws_away(begin, end, r"the host takes \d+% of the processors' time")

    def test_a_round_does_not_count_in_which_others_ran(self):
        def begin():
            self.machine.others = 2

        def end():
            self.machine.others = 0

        self.throws_away(begin, end, "processes of others want to run")

    def test_a_round_does_not_count_after_which_the_raw_disk_has_another_pace(self):
        def begin():
            self.machine.times = [0.3]

        self.throws_away(begin, lambda: None, "the raw disk's times differ")

    def test_a_run_ends_after_three_busy_tries_and_none_of_them_counts(self):
        def during(count, key):
            self.machine.stolen += 5000

        self.paper.during = during
        with self.assertRaisesRegex(quiet.Busy, "round 1, was thrown away 3 times, at last since the host takes"):
            self.run_it()
        self.assertEqual(self.rounds_of(FAR), [0, 0, 0])
        self.assertEqual(self.kept.records(self.experiment), [])
        self.assertEqual(len(self.discarded()), 3)

    def test_a_round_that_is_interrupted_is_judged_as_far_as_it_got(self):
        def during(count, key):
            self.machine.stolen += 5000
            if count == 3:
                raise KeyboardInterrupt

        self.paper.during = during
        self.assertRaises(KeyboardInterrupt, self.run_it)
        self.assertEqual(self.kept.records(self.experiment), [])
        self.assertEqual(len(self.discarded()[0]["keys"]), 2)

    def test_a_quick_run_does_not_look_at_the_machine(self):
        self.machine.others = 3
        self.assertEqual(runner.run([self.experiment], Profile(True, 1), self.kept, quiet.Careless()), 0)
        self.assertEqual(self.machine.probed, 0)
        self.assertEqual(self.rounds_of(CLOSE), [0])


class Options(unittest.TestCase):
    """Of bench/papers."""

    def run_it(self, *words):
        """How it ends, and what it says."""
        loader = SourceFileLoader("papers", str(Path(__file__).parents[1] / "papers"))
        program = module_from_spec(spec_from_loader("papers", loader))
        said = io.StringIO()
        with (
            mock.patch.object(sys, "path", list(sys.path)),
            mock.patch.object(sys, "argv", ["papers", *words]),
            mock.patch.object(sys, "dont_write_bytecode", True),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            self.assertRaises(SystemExit) as ended,
        ):
            loader.exec_module(program)
            program.main()
        return ended.exception.code, said.getvalue()

    def test_a_full_run_has_no_fewer_than_three_rounds(self):
        code, said = self.run_it("--rounds", "2")
        self.assertEqual(code, 2)
        self.assertIn("--rounds 2: at least 3, or fewer than 3 with --quick", said)
        code, said = self.run_it("--quick", "--rounds", "0")
        self.assertEqual(code, 2)
        self.assertIn("--rounds 0: at least 1", said)

    def test_help_says_how_many_rounds_there_are(self):
        code, said = self.run_it("--help")
        self.assertEqual(code, 0)
        self.assertIn("at least 3 (default 3, and 5 of what is", said)
        self.assertIn("within 10% of the paper's ratio; quick 1)", said)


class Kernel(unittest.TestCase):
    TEXT = "cpu  10 20 30 400 50 6 7 80 9 1\ncpu0 1 2 3 4 5 6 7 8 9 1\nctxt 5\nprocs_running 4\nprocs_blocked 2\n"

    def test_the_hosts_part_and_the_others_processes_are_read_from_the_kernel(self):
        with mock.patch("builtins.open", lambda path: io.StringIO(self.TEXT)):
            self.assertEqual(quiet.Machine().ticks(), quiet.Ticks(603, 80))
            self.assertEqual(quiet.Machine().running(), 3)
