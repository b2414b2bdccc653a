"""A guest with the bursts of the recorded one that made the dissertation's author think of pauses."""

from isobath_bench.live import guest

from ..page import Section, Table
from ..plan import Point
from ..verdict import Cause, Verdict, compared
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
KEYS = [(QEMU, NONE), (QEMU, NORMAL), (ISOBATH, NONE), (ISOBATH, NORMAL), (ISOBATH, DISSERTATION), (ISOBATH, ADAPTIVE)]


def length(profile):
    """Of the trace, in seconds."""
    return profile.of(1.2, 40)


def observed(profile):
    """Seconds of the guest without a job."""
    return profile.of(0.7, 16)


def data(profile):
    """Bytes of the disk that is streamed."""
    return profile.of(12, 512) << 20


def points(profile):
    seconds = {NONE: 20, NORMAL: 15, DISSERTATION: 20, ADAPTIVE: 15}
    return [Point(key, seconds=profile.of(1.5, seconds[key[1]])) for key in KEYS]


class Setting(beside.Setting):
    def __init__(self, profile, place):
        super().__init__(profile, place)
        self.schedule = guest.trace(SEED, length(profile))


def setting(profile):
    return beside.setting(profile, LAYERS - 1, data(profile), Setting)


def measure(setting, point, number):
    del number
    contender, mode = point.key
    profile = setting.profile
    hurry = SECONDS / length(profile)
    lead = beside.LOOK / hurry
    most = observed(profile) if mode == NONE else length(profile) - lead
    return beside.measure(setting.place, contender, mode, setting.schedule, hurry=hurry, lead=lead, most=most)


def section(results):
    profile = results.profile
    return Section(
        paper=(
            "A published trace of RocksDB under YCSB on an SSD: 1,200 s, 574 s of them in bursts of 20 times the load"
            " between them, 7.86 s on average and 48 s at most. From that the author concludes that a stream can run in"
            " the pauses. Nothing was measured with the trace itself; the ratios of bandwidth below are those of figure"
            " 4.3."
        ),
        ours=(
            f"A guest with bursts of these statistics, {SECONDS / length(profile):g} times as fast, and so are the"
            f" pauses of the dissertation's mode; it does nothing between them. {guest.BLOCK >> 10} KiB random reads"
            f" and writes, {guest.DEPTH} at a time. {LAYERS - 1} layers of {data(profile) * beside.FILL / 2**20:,.0f}"
            f" MiB together are streamed, all on a simulated disk ({beside.about()})."
        ),
        parts=[
            statistics(results),
            pictures.jobs(results, "What a job costs the guest, and how long it takes", KEYS),
            pictures.evolution(
                results, "fig1-2", "A guest with the bursts of the trace (figure 1.2), and jobs beside it", KEYS
            ),
        ],
        verdicts=verdicts(results),
    )


def bursts(results):
    """The bursts' lengths as parts of the trace's, as they are on record."""
    for key in KEYS:
        for sample in results.samples(key):
            return [(end - start) / length(results.profile) for start, end in sample["bursts"]]
    return []


def statistics(results):
    here = bursts(results)
    if not here:
        return None
    seconds = length(results.profile)
    rows = [
        ["length, s", f"{SECONDS:,}", f"{seconds:g}"],
        ["in bursts, s", f"{BUSY}", f"{sum(here) * seconds:.2f}"],
        ["a burst, mean, s", f"{MEAN}", f"{sum(here) / len(here) * seconds:.3f}"],
        ["the longest burst, s", f"{LONGEST}", f"{max(here) * seconds:.2f}"],
    ]
    return Table("The guest's bursts", ["", "paper", "here"], rows)


def verdicts(results):
    here, ours = bursts(results), (ISOBATH, ADAPTIVE)
    shape = [
        Verdict(
            "part of the time in bursts", BUSY / SECONDS, sum(here) if here else None, None, "equal", form="{:.3f}"
        ),
        Verdict(
            "the mean burst ÷ the trace",
            MEAN / SECONDS,
            sum(here) / len(here) if here else None,
            None,
            "equal",
            form="{:.4f}",
        ),
        Verdict(
            "the longest burst ÷ the trace", LONGEST / SECONDS, max(here, default=None), None, "equal", form="{:.3f}"
        ),
    ]

    def against(what, other, paper):
        return compared(results, what, paper, ours, other, "bandwidth", "higher", beside.DRAINS, cause=Cause.OURS)

    done = [sample["finished"] for sample in results.samples(ours)]
    return [
        *shape,
        Verdict(
            "an adaptive job ends within the trace (1: yes)",
            1,
            float(all(done)) if done else None,
            None,
            "equal",
            beside.DRAINS,
            "{:.0f}",
        ),
        against("guest's bandwidth: adaptive ÷ no job", beside.without_job(ours), SHARE[ADAPTIVE]),
        against("guest's bandwidth: adaptive ÷ QEMU's normal job", (QEMU, NORMAL), SHARE[ADAPTIVE] / SHARE[NORMAL]),
    ]
