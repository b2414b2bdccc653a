"""A guest with the bursts of the recorded one that made the dissertation's author think of pauses."""

import contextlib

from isobath_bench.live import guest

from ..page import Section, Table, Verdict
from ..plan import Point
from . import beside, pictures
from .beside import ADAPTIVE, DISSERTATION, ISOBATH, NONE, NORMAL, QEMU

NAME = "trace"
TITLE = "A guest with the bursts of a recorded one"
SOURCE = "Adaptive streaming, figure 1.2"

# Printed in section 1.3, in seconds; the guest's bandwidth beside a job ÷ that without is of section 4.3.2.
SECONDS, BUSY, MEAN, LONGEST = guest.TRACE_SECONDS, guest.TRACE_BUSY, guest.TRACE_MEAN, guest.TRACE_LONGEST
SHARE = {NORMAL: 203 / 335.45, ADAPTIVE: 265.82 / 335.45}

SEED = 116
LAYERS = 30
PART = 128 << 20
KEYS = [(QEMU, NONE), (QEMU, NORMAL), (ISOBATH, NONE), (ISOBATH, NORMAL), (ISOBATH, DISSERTATION), (ISOBATH, ADAPTIVE)]


def length(profile):
    """Of the trace, in seconds."""
    return profile.of(1.2, 40)


def data(profile):
    """Bytes of the disk that is streamed."""
    return profile.of(16, 512) << 20


def points(profile):
    seconds = {NONE: 43, NORMAL: 12, DISSERTATION: 40, ADAPTIVE: 15}
    return [Point(key, seconds=profile.of(1.5, seconds[key[1]]), rounds=1) for key in KEYS]


class Setting:
    def __init__(self, profile, place):
        self.profile = profile
        self.place = place
        self.schedule = guest.trace(SEED, length(profile))


@contextlib.contextmanager
def setting(profile):
    with beside.place(LAYERS - 1, data(profile), profile.of(8 << 20, PART)) as place:
        yield Setting(profile, place)


def measure(setting, point, number):
    del number
    hurry = SECONDS / length(setting.profile)
    lead = beside.LOOK / hurry
    return beside.measure(setting.place, *point.key, setting.schedule, hurry=hurry, speed=0, lead=lead, most=length(setting.profile) - lead)
