"""What a stream costs a guest that never pauses."""

from isobath_bench.live import guest

from ..page import Section, Table
from ..plan import Point
from ..verdict import Cause, Verdict, compared
from . import beside, pictures
from .beside import ADAPTIVE, ISOBATH, NORMAL, QEMU

NAME = "motivation"
TITLE = "A stream beside a guest that is always busy"
SOURCE = "Adaptive streaming, figure 1.1"

# MB/s of the guest while the job runs and after it, printed in section 1.3.
DURING, AFTER = 218.63, 361.0

LAYERS = 10
DEADLINE = "adaptive, with a deadline"
KEYS = [(QEMU, NORMAL), (ISOBATH, NORMAL), (ISOBATH, DEADLINE), (ISOBATH, ADAPTIVE)]

FULL_SPEED = (
    "At full speed isobath keeps many pieces under way, where QEMU has one: it takes a larger part of the disk for a"
    " shorter time. That is for disks that nobody waits for; its default is adaptive."
)


def data(profile):
    """Bytes of the disk that is streamed."""
    return profile.of(16, 128) << 20


def lead(profile):
    """Seconds of the guest by itself, before the job and after it."""
    return profile.of(0.5, 3)


def most(profile):
    """Seconds that a job is given; the adaptive one without a deadline is not there to be done."""
    return profile.of(2, 20)


def deadline(profile):
    """Seconds."""
    return profile.of(1, 12)


def points(profile):
    seconds = {NORMAL: 12, DEADLINE: 22, ADAPTIVE: 30}
    return [Point(key, seconds=profile.of(3, seconds[key[1]])) for key in KEYS]


def setting(profile):
    return beside.setting(profile, LAYERS - 1, data(profile))


def measure(setting, point, number):
    del number
    profile = setting.profile
    contender, mode = point.key
    schedule = [guest.Burst(0, most(profile) + 2 * lead(profile) + 10)]
    within = deadline(profile) if mode == DEADLINE else None
    mode = ADAPTIVE if mode == DEADLINE else mode
    by_itself = lead(profile)
    return beside.measure(
        setting.place, contender, mode, schedule, lead=by_itself, most=most(profile), after=by_itself, deadline=within
    )


def section(results):
    profile = results.profile
    return Section(
        paper=(
            "fio's bandwidth in a guest whose chain of 10 snapshots is streamed: 218.63 MB/s meanwhile, 361 MB/s"
            " afterwards, a loss of 39 % that lasts for up to 600 s. That is what the dissertation sets out to mend."
        ),
        ours=(
            f"{guest.BLOCK >> 10} KiB random reads and writes, {guest.DEPTH} at a time, over NBD, without pauses."
            f" {LAYERS - 1} layers, {data(profile) * beside.FILL / 2**20:,.0f} MiB in clusters of 64 KiB with random"
            " owners, are streamed into the active one; all images lie, without the page cache, on a simulated disk"
            f" ({beside.about()}). *Normal* is QEMU's `block-stream`, and isobath's with `pacing` `none`. Isobath's"
            f" default, *adaptive*, gives a steady guest's job a few percent; it is cancelled after {most(profile)} s."
            f" With a *deadline*, of {deadline(profile)} s here, it takes what it needs for that."
        ),
        parts=[
            pictures.evolution(
                results, "fig1-1", "The guest's bandwidth before, beside and after a job (figure 1.1)", KEYS
            ),
            table(results),
        ],
        verdicts=verdicts(results),
    )


def table(results):
    rows = []
    for key in KEYS:
        rows.append(
            [
                *key,
                *(results.text(key, field, "{:,.1f}") for field in ("bandwidth", "bandwidth_after")),
                results.text(key, "kept", "{:.2f}x"),
                pictures.took(results, key),
                results.text(key, "lost_mb"),
            ]
        )
    rows.append(["paper: QEMU", NORMAL, f"{DURING:.1f}", f"{AFTER:.1f}", f"{DURING / AFTER:.2f}x", "up to 600", "-"])
    columns = [
        "by",
        "job",
        "guest meanwhile, MB/s",
        "afterwards, MB/s",
        "meanwhile ÷ afterwards",
        "job's time, s",
        "what the guest lost, MB",
    ]
    return Table("What a job costs a guest without pauses", columns, rows)


def verdicts(results):
    def kept(what, key, better, why, **more):
        ours, spread = results.median(key, "kept"), results.spread(key, "kept")
        return Verdict(what, DURING / AFTER, ours, spread, better, why, points=(key,), **more)

    def beside_qemu(what, field, why):
        return compared(results, what, None, full, qemu, field, "lower", why)

    full, qemu = (ISOBATH, NORMAL), (QEMU, NORMAL)
    return [
        kept("guest's bandwidth beside QEMU's job ÷ after it", qemu, "equal", beside.ONE_PIECE, check=True),
        kept(
            "guest's bandwidth beside isobath's adaptive job ÷ after it", (ISOBATH, ADAPTIVE), "higher", beside.DRAINS
        ),
        kept("the same with a deadline", (ISOBATH, DEADLINE), "higher", beside.DRAINS, cause=Cause.OURS),
        kept("the same with isobath at full speed", full, "higher", FULL_SPEED, cause=Cause.OURS),
        beside_qemu("how long it lasts: isobath at full speed ÷ QEMU", "seconds", "The paper has QEMU's time alone."),
        beside_qemu(
            "what the guest loses in all: isobath at full speed ÷ QEMU", "lost_mb", "The paper has QEMU's loss alone."
        ),
    ]
