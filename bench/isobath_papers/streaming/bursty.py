"""A guest that works in bursts, and a job in every mode beside it: the dissertation's evaluation with fio."""

from isobath_bench.live import guest

from .. import figures
from ..page import Section
from ..plan import Point
from ..verdict import Cause, Verdict, compared
from . import beside, pictures
from .beside import ADAPTIVE, DISSERTATION, ISOBATH, LIMIT, NONE, NORMAL, QEMU

NAME = "bursty"
TITLE = "A guest that works in bursts"
SOURCE = "Adaptive streaming, figures 4.3 to 4.7 and table 4.3"

# MB/s of the guest, printed in section 4.3.2 and drawn in figure 4.3.
BANDWIDTH = {NONE: 335.45, NORMAL: 203.0, LIMIT: 204.59, ADAPTIVE: 265.82}
# Seconds, printed; the normal job's is said to be about half of the speed-limited one's.
RUNTIME = {LIMIT: 740, ADAPTIVE: 673, NORMAL: 740 / 2}
# Table 4.3: the part of the job's time in which it runs.
USRR = {NORMAL: 1.0, LIMIT: 0.6202, ADAPTIVE: 0.3195}
# Why ratios differ.
PAUSES = "A job that leaves the bursts to the guest has the pauses alone, which are half of the time."
SLEEPS = (
    "It is the part of its time in which a job of that speed does not sleep: the limit is half of the normal job's"
    " speed beside the guest."
)
FILLS = (
    "The guest does nothing in its pauses, which are half of the time, and the job fills them: a smaller part would"
    " only make it take longer. What it costs is seen in the guest's bandwidth, and in the bursts' time in which it"
    " gets on."
)

SEED = 223
LAYERS = 30
KEYS = [
    (QEMU, NONE),
    (QEMU, NORMAL),
    (QEMU, LIMIT),
    (ISOBATH, NONE),
    (ISOBATH, NORMAL),
    (ISOBATH, LIMIT),
    (ISOBATH, DISSERTATION),
    (ISOBATH, ADAPTIVE),
]
OURS = (ISOBATH, ADAPTIVE)
# What a measurement takes, in seconds, beside making the images.
SECONDS = {NONE: 8, NORMAL: 8, LIMIT: 18, DISSERTATION: 9, ADAPTIVE: 6}


def longest(profile):
    """Of the bursts, in seconds: the dissertation's is 20."""
    return profile.of(0.5, 2)


def data(profile):
    """Bytes of the disk that is streamed."""
    return profile.of(12, 320) << 20


def points(profile):
    return [Point(key, seconds=profile.of(1.3, SECONDS[key[1]] + 4)) for key in KEYS]


class Setting(beside.Setting):
    """`speed` limits jobs, in bytes per second: half of what QEMU's normal job does beside the guest, as the
    dissertation's limit of 60 MB/s was."""

    def __init__(self, profile, place):
        super().__init__(profile, place)
        self.schedule = guest.bursts(SEED, longest(profile), profile.of(6, 100))
        normal = self.measure(QEMU, NORMAL, 0)
        self.speed = round(data(profile) * beside.FILL / normal["seconds"] / 2)

    def measure(self, contender, mode, speed):
        hurry = 20 / longest(self.profile)
        most = self.profile.of(0.7, 8) if mode == NONE else self.profile.of(4, 60)
        return beside.measure(
            self.place, contender, mode, self.schedule, hurry=hurry, speed=speed, lead=beside.LOOK / hurry, most=most
        )


def setting(profile):
    return beside.setting(profile, LAYERS - 1, data(profile), Setting)


def measure(setting, point, number):
    del number
    return setting.measure(*point.key, setting.speed) | {"speed": setting.speed}


def section(results):
    profile = results.profile
    return Section(
        paper=(
            "fio does random reads and writes of 16 KiB, 64 at a time, in bursts and pauses of 1 to 20 s, while 30"
            " snapshots are streamed. Without a job the guest has 335 MB/s; a normal job costs it 39 % of that, a speed"
            " limit of 60 MB/s helps little, and the adaptive job, which pauses for a second whenever the guest is"
            " busy, costs it 21 % and takes about 1.8 times as long as the normal one. USRR is the part of a job's time"
            " in which it runs."
        ),
        ours=(
            f"The same load over NBD, the images without the page cache on a simulated disk ({beside.about()}), which"
            f" is the same for all. {LAYERS - 1} layers of {data(profile) * beside.FILL / 2**20:,.0f} MiB together, in"
            " clusters of 64 KiB with random owners, are streamed into the active one; bursts and pauses of"
            f" {longest(profile) / 20:g} to {longest(profile):g} s, always the same ones, so time goes"
            f" {20 / longest(profile):g} times as fast, and so do the pauses of the dissertation's mode. That mode is"
            " *isobath, dissertation's*: the algorithm as published, since no QEMU has it; its look at the guest, 15 s"
            " before it starts, is taken before its time is. The speed limit is half of the speed of QEMU's normal job"
            " beside this guest, as the paper's is of its own. *isobath, adaptive* is what isobath does unless told"
            f" otherwise. *Gets on*: a job's progress is read each {beside.POLL * 1000:.0f} ms; it runs where that"
            f" moves, or has stood still for {beside.STILL * 1000:.0f} ms at most."
        ),
        parts=[
            pictures.jobs(results, "What a job costs the guest, and how long it takes", KEYS),
            shares(results),
            runtimes(results),
            pictures.evolution(
                results,
                "fig4-5",
                "The guest's bandwidth, and the job (figures 4.5 to 4.7)",
                [key for key in KEYS if key != (ISOBATH, NONE)],
            ),
        ],
        verdicts=verdicts(results),
    )


def by_mode(results, field, other):
    """A field by mode and contender, ÷ that of `other(contender)`."""
    modes = (NORMAL, LIMIT, DISSERTATION, ADAPTIVE)
    return {
        mode: {who: results.ratio((who, mode), other(who), field) for who, each in KEYS if each == mode}
        for mode in modes
    }


def shares(results):
    """Figure 4.3: the guest's bandwidth as a part of that without a job, since the disks differ."""
    here = by_mode(results, "bandwidth", lambda who: (who, NONE))
    paper = {mode: {QEMU: BANDWIDTH[mode] / BANDWIDTH[NONE]} for mode in (NORMAL, LIMIT, ADAPTIVE)}
    return figures.bars(
        results,
        "fig4-3",
        "The guest's bandwidth beside a job (figure 4.3)",
        "part of that without a job",
        here,
        paper=paper,
        form="{:.2f}",
    )


def runtimes(results):
    """Figure 4.4."""
    here = by_mode(results, "seconds", lambda who: (QEMU, NORMAL))
    paper = {mode: {QEMU: RUNTIME[mode] / RUNTIME[NORMAL]} for mode in (NORMAL, LIMIT, ADAPTIVE)}
    return figures.bars(
        results,
        "fig4-4",
        "How long the job takes (figure 4.4)",
        "÷ QEMU's normal job",
        here,
        paper=paper,
        form="{:.2f}",
    )


def verdicts(results):
    normal, limit = (QEMU, NORMAL), (QEMU, LIMIT)

    def against(what, key, other, field, paper, better, why, **more):
        return compared(results, what, paper, key, other, field, better, why, **more)

    def kept(what, key, other, paper, better, why, **more):
        return against(f"guest's bandwidth: {what}", key, other, "bandwidth", paper, better, why, **more)

    def usrr(what, key, paper, better, why, **more):
        ours, spread = results.median(key, "usrr"), results.spread(key, "usrr")
        return Verdict(f"USRR: {what}", paper, ours, spread, better, why, "{:.2f}", points=(key,), **more)

    active = USRR[ADAPTIVE] * RUNTIME[ADAPTIVE] / (USRR[LIMIT] * RUNTIME[LIMIT])
    return [
        kept(
            "adaptive ÷ no job",
            OURS,
            beside.without_job(OURS),
            BANDWIDTH[ADAPTIVE] / BANDWIDTH[NONE],
            "higher",
            beside.DRAINS,
        ),
        kept(
            "adaptive ÷ QEMU's normal job",
            OURS,
            normal,
            BANDWIDTH[ADAPTIVE] / BANDWIDTH[NORMAL],
            "higher",
            beside.DRAINS,
        ),
        kept(
            "adaptive ÷ QEMU's with a speed limit",
            OURS,
            limit,
            BANDWIDTH[ADAPTIVE] / BANDWIDTH[LIMIT],
            "higher",
            beside.DRAINS,
        ),
        kept(
            "QEMU's normal job ÷ no job",
            normal,
            beside.without_job(normal),
            BANDWIDTH[NORMAL] / BANDWIDTH[NONE],
            "equal",
            beside.ONE_PIECE,
            check=True,
        ),
        against(
            "job's time: adaptive ÷ QEMU's normal job",
            OURS,
            normal,
            "seconds",
            RUNTIME[ADAPTIVE] / RUNTIME[NORMAL],
            "lower",
            PAUSES,
        ),
        against(
            "job's time: adaptive ÷ QEMU's with a speed limit",
            OURS,
            limit,
            "seconds",
            RUNTIME[ADAPTIVE] / RUNTIME[LIMIT],
            "lower",
            PAUSES,
        ),
        usrr("QEMU's with a speed limit", limit, USRR[LIMIT], "equal", SLEEPS, check=True),
        usrr("the dissertation's mode", (ISOBATH, DISSERTATION), USRR[ADAPTIVE], "lower", FILLS, cause=Cause.OURS),
        usrr("adaptive", OURS, USRR[ADAPTIVE], "lower", FILLS, cause=Cause.OURS),
        against(
            "time in which the job gets on: adaptive ÷ QEMU's with a speed limit",
            OURS,
            limit,
            "active",
            active,
            "lower",
            PAUSES,
        ),
    ]
