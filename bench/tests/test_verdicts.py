"""What is said of a paper's figure beside ours."""

import json
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from isobath_bench import servers
from isobath_papers import page, record
from isobath_papers.verdict import (
    Baseline,
    Cause,
    Outcome,
    Unclassified,
    Verdict,
    counted,
    require_reasons,
    told_of_baselines,
)

BY_ITSELF = Verdict("ours ÷ raw", 0.9, 1.0)


def missed(today, **more):
    """A prototype that was 4 times as fast as its QEMU, which took 5 times as long as raw, and ours, which is not."""
    return Verdict("ours ÷ QEMU", 4.0, 1.5, why="a reason", baseline=Baseline("QEMU ÷ raw", 5.0, today, **more))


class Outcomes(unittest.TestCase):
    def test_a_goal_is_reached_to_3_percent_or_the_spread(self):
        self.assertIs(Verdict("", 1.0, 0.98).outcome, Outcome.REACHED)
        self.assertIs(Verdict("", 1.0, 0.96, cause=Cause.OURS).outcome, Outcome.OURS)
        self.assertIs(Verdict("", 1.0, 0.96, spread=0.1, cause=Cause.OURS).outcome, Outcome.REACHED)
        self.assertIs(Verdict("", 1.0, 1.04, better="lower", cause=Cause.SCALE).outcome, Outcome.SCALE)

    def test_that_the_baseline_moved_follows_from_both_figures(self):
        self.assertIs(missed(2.0, instead=BY_ITSELF.what).outcome, Outcome.MOVED)
        for today in (None, 4.9, 5.0, 6.0):
            self.assertIs(missed(today, instead=BY_ITSELF.what).outcome, Outcome.UNCLASSIFIED)

    def test_without_raw_the_goal_is_taken_to_the_qemu_of_today(self):
        self.assertIs(missed(1.8).outcome, Outcome.MOVED)
        self.assertIs(missed(2.5).outcome, Outcome.UNCLASSIFIED)
        latency = Verdict("", 0.25, 0.6, better="lower", baseline=Baseline("", 5.0, 2.0))
        self.assertIs(latency.outcome, Outcome.MOVED)
        self.assertAlmostEqual(latency.goal_today, 0.625)

    def test_a_moved_baseline_goes_before_a_cause_and_a_reached_goal_before_it(self):
        given = {"baseline": Baseline("", 5.0, 2.0, BY_ITSELF.what), "cause": Cause.OURS}
        self.assertIs(Verdict("", 4.0, 1.5, **given).outcome, Outcome.MOVED)
        self.assertIs(Verdict("", 4.0, 4.5, **given).outcome, Outcome.REACHED)

    def test_a_check_of_qemu_is_as_in_the_paper_or_moved_and_no_goal(self):
        same = Verdict("QEMU", 0.61, 0.64, better="equal", check=True)
        other = Verdict("QEMU", 0.61, 0.39, better="equal", check=True)
        self.assertEqual([same.word, other.word], ["as in the paper", "baseline moved"])
        self.assertEqual(
            counted([same, other, BY_ITSELF]),
            "1 of 1 reached, 0 baseline moved, 0 not reached; of 2 checks of QEMU itself 1 as in the paper,"
            " 1 baseline moved.",
        )

    def test_what_is_missed_is_counted_by_class(self):
        rows = [Verdict("", 2.0, 1.0, cause=cause) for cause in (Cause.OURS, Cause.MACHINE, Cause.OURS)]
        rows += [BY_ITSELF, missed(2.0, instead=BY_ITSELF.what), Verdict("", None, 1.0)]
        self.assertEqual(
            counted(rows),
            "1 of 6 reached, 1 baseline moved, 3 not reached (2 ours, 1 machine), 1 not comparable.",
        )


class Reasons(unittest.TestCase):
    def refused(self, *verdicts):
        with self.assertRaises(Unclassified) as caught:
            require_reasons("paper.experiment", verdicts)
        return str(caught.exception)

    def test_a_missed_goal_needs_a_class(self):
        said = self.refused(Verdict("a figure", 2.0, 1.0, why="a reason"), BY_ITSELF)
        self.assertIn("paper.experiment: a figure: the paper 2.00x, here 1.00x: not reached, without a cause", said)
        self.assertNotIn(BY_ITSELF.what, said)

    def test_a_class_and_a_moved_baseline_need_a_reason(self):
        self.assertIn("ours, without a reason", self.refused(Verdict("a figure", 2.0, 1.0, cause=Cause.OURS)))
        check = Verdict("QEMU", 1.0, 2.0, better="equal", check=True)
        self.assertIn("baseline moved, without a reason", self.refused(check))

    def test_what_is_compared_instead_is_a_row_with_a_figure(self):
        row = missed(2.0, instead=BY_ITSELF.what)
        require_reasons("", [row, BY_ITSELF])
        self.assertIn("no figure of 'ours ÷ raw'", self.refused(row))
        self.assertIn("no figure of 'ours ÷ raw'", self.refused(row, Verdict(BY_ITSELF.what, 0.9, None)))

    def test_both_figures_of_a_moved_baseline_are_told_and_what_is_compared_instead(self):
        row = missed(2.0, instead=BY_ITSELF.what, at_least=True)
        self.assertEqual(
            told_of_baselines([row, BY_ITSELF])[2],
            "- *ours ÷ QEMU*: QEMU ÷ raw, at least 5.00x in the paper, 2.00x today. Instead: *ours ÷ raw*, the paper"
            " 0.90x, here 1.00x: reached.",
        )
        self.assertIn("the paper's 4.00x would be 1.44x; here it is 1.50x", told_of_baselines([missed(1.8)])[2])


class Pages(unittest.TestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.raw = self.directory / "raw"
        shutil.copytree(record.KEPT, self.raw)
        # The pages are of the QEMU that was measured, not of the one that is installed.
        version = json.loads((self.raw / "machine.json").read_text())["qemu"].split()[1]
        name = "QEMU " + ".".join(version.split(".")[:2])
        self.enterContext(mock.patch.object(servers, "qemu_name", lambda program: name))
        servers.qemus.cache_clear()
        self.addCleanup(servers.qemus.cache_clear)

    def test_the_committed_pages_are_those_of_the_committed_raw_lines(self):
        pages = self.directory / "pages"
        page.from_directory(self.raw, pages)
        made = sorted(path.name for path in pages.glob("*.md"))
        self.assertEqual(made, sorted(path.name for path in record.RESULTS.glob("*.md")))
        for name in made:
            self.assertEqual((pages / name).read_text(), (record.RESULTS / name).read_text(), name)

    def test_no_page_is_changed_where_raw_lines_miss_a_goal_that_has_no_class(self):
        path = self.raw / "svd.dd.jsonl"
        records = record.read(path)
        for each in records:
            if each["key"][1] == "isobath indexed":
                each["sample"]["mb_per_second"] /= 1e6
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        pages = self.directory / "pages"
        (pages / "figures").mkdir(parents=True)
        for name in ("README.md", "svd.md", "figures/svd-fig6.svg"):
            (pages / name).write_text("as before")
        with self.assertRaises(Unclassified) as caught:
            page.from_directory(self.raw, pages)
        self.assertIn("svd.dd: dd, 50 snapshots: SVD ÷ QEMU", str(caught.exception))
        left = sorted(path for path in pages.rglob("*") if path.is_file())
        self.assertEqual([path.name for path in left], ["README.md", "svd-fig6.svg", "svd.md"])
        self.assertEqual({path.read_text() for path in left}, {"as before"})
