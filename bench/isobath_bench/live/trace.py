"""A stream beside a guest with the burst statistics of a recorded one."""

from .. import tools
from . import guest, pacing
from .under_load import ADAPTIVE, NORMAL, THRESHOLD

SEED = 116


def data():
    """Bytes of the disk that is streamed."""
    return (64 << 20) if tools.QUICK else 768 << 20


def run(rounds, seconds):
    length = 12 if tools.QUICK else max(12 * seconds, 12)
    schedule = guest.trace(SEED, length)
    text = (
        f"Bursts with the statistics of the dissertation's trace ({guest.TRACE_SECONDS:,} s, {guest.TRACE_BUSY} s of"
        f" them in {len(schedule)} bursts of {guest.TRACE_MEAN} s on average and {guest.TRACE_LONGEST} s at most),"
        f" {guest.TRACE_SECONDS / length:g} times as fast, and so is its mode's pause. "
    )
    bounds = {
        "bandwidth": {"at_least": 0.97},
        "p99": {"at_most": 1.2},
        "runtime": {"at_most": 1.3},
        "of_pauses": {"at_most": 1.3},
    }
    return pacing.compare(
        "trace",
        "A guest with the bursts of a trace",
        text,
        schedule,
        data(),
        [NORMAL, THRESHOLD, ADAPTIVE],
        most=length,
        bounds=bounds,
        rounds=pacing.repeat(rounds),
        hurry=guest.TRACE_SECONDS / length,
    )
