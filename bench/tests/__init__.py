"""Tests of the papers' verdicts, pages and rounds: without measurements, and without matplotlib, which draws figures.

python3 -m unittest discover --top-level-directory bench --start-directory bench/tests
"""

import sys
from unittest import mock


def subplots(rows=1, columns=1, **_):
    """A figure, and axes that take everything."""
    axes = mock.MagicMock()
    axes.flat = [mock.MagicMock() for _ in range(rows * columns)]
    return mock.MagicMock(), axes


sys.modules["matplotlib"] = mock.MagicMock()
sys.modules["matplotlib"].pyplot.subplots = subplots
