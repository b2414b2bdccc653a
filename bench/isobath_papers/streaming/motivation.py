"""What a stream costs a guest that never pauses."""

import contextlib

from isobath_bench.live import guest

from ..page import Section, Table, Verdict
from ..plan import Point
from . import beside, pictures
from .beside import ADAPTIVE, ISOBATH, NORMAL, QEMU

NAME = "motivation"
TITLE = "A stream beside a guest that is always busy"
SOURCE = "Adaptive streaming, figure 1.1"

# MB/s of the guest while the job runs and after it, printed in section 1.3.
DURING, AFTER = 218.63, 361.0

LAYERS = 10
KEYS = [(QEMU, NORMAL), (ISOBATH, NORMAL), (ISOBATH, ADAPTIVE)]
PART = 128 << 20


def data(profile):
    """Bytes of the disk that is streamed."""
    return profile.of(16, 128) << 20


def lead(profile):
    """Seconds of the guest by itself, before the job and after it."""
    return profile.of(0.5, 3)


def most(profile):
    """Seconds that a job is given."""
    return profile.of(3, 90)


def points(profile):
    return [Point(key, seconds=profile.of(5, 60 if key[1] == ADAPTIVE else 20), rounds=2) for key in KEYS]


class Setting:
    def __init__(self, profile, place):
        self.profile = profile
        self.place = place


@contextlib.contextmanager
def setting(profile):
    with beside.place(LAYERS - 1, data(profile), profile.of(8 << 20, PART)) as place:
        yield Setting(profile, place)


def measure(setting, point, number):
    del number
    profile = setting.profile
    schedule = [guest.Burst(0, most(profile) + 2 * lead(profile) + 10)]
    return beside.measure(
        setting.place, *point.key, schedule, hurry=1, speed=0, lead=lead(profile), most=most(profile), after=lead(profile),
    )  # fmt: skip
