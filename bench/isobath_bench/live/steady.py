"""A stream beside a guest that never pauses."""

from .. import tools
from . import guest, pacing
from .under_load import ADAPTIVE, NORMAL, THRESHOLD

SEED = 11


def data():
    """Bytes of the disk that is streamed: little, since most of it has to go beside the guest."""
    return (32 << 20) if tools.QUICK else 64 << 20


def run(rounds, seconds):
    del seconds
    most = 20 if tools.QUICK else 75
    schedule = [guest.Burst(0, most + 30)]
    text = (
        f"No pauses. A job that is not done after {most} s is cancelled; the dissertation's is given as long as the"
        " adaptive one took. "
    )
    bounds = {"bandwidth": {"at_least": 0.9}, "finished": {"at_least": 1}}
    modes = [NORMAL, ADAPTIVE, THRESHOLD]
    return pacing.compare(
        "steady",
        "A steady guest",
        text,
        schedule,
        data(),
        modes,
        most=most,
        bounds=bounds,
        rounds=pacing.repeat(rounds),
        even=True,
    )
