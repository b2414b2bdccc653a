"""A stream beside a guest that works in bursts: what each loses to the other."""

from .. import report, tools
from ..rounds import Samples
from . import guest, timeline
from . import under_load as load
from .under_load import ADAPTIVE, ALONE, BASELINE, LIMIT, NORMAL, THRESHOLD

SEED = 223
# What the dissertation reports: the guest's bandwidth ÷ that without a job, the job's time ÷ the normal one's.
REPORTED = {NORMAL: (203 / 335.45, 1), LIMIT: (204.59 / 335.45, 2), THRESHOLD: (265.82 / 335.45, 1.8)}


def data():
    """Bytes of the disk that is streamed."""
    return (64 << 20) if tools.QUICK else 1 << 30


def run(rounds, seconds):
    longest = 2 if tools.QUICK else max(seconds, 2)
    schedule = guest.bursts(SEED, longest, 40 * longest)
    modes = [NORMAL, LIMIT, THRESHOLD, ADAPTIVE]
    text = (
        f"Bursts and pauses of {longest / 20:g} to {longest:g} s, evenly distributed, always the same ones: the"
        " dissertation's of 1 to 20 s"
        + (f", {20 / longest:g} times as fast, and so is its mode's pause. " if longest != 20 else ". ")
    )
    bounds = {
        "bandwidth": {"at_least": 0.97},
        "p99": {"at_most": 1.2},
        "runtime": {"at_most": 1.3},
        "of_pauses": {"at_most": 1.3},
    }
    return compare(
        "pacing",
        "A guest that works in bursts",
        text,
        schedule,
        data(),
        modes,
        most=max(60, 15 * longest),
        bounds=bounds,
        rounds=repeat(rounds),
        hurry=20 / longest,
        reported=REPORTED,
    )


def repeat(rounds):
    """Rounds: the disk is simulated and a run long, so that one says as much as five elsewhere."""
    return max(rounds // 5, 1)


def compare(name, title, text, schedule, data, modes, *, most, bounds, rounds, hurry=1.0, reported=None, even=False):
    """Runs a job in every mode beside the same guest, for at most some seconds, and says what it cost whom.
    `hurry`: how many times as fast as the dissertation's the guest's time goes; `even`: its mode is given as
    long as the adaptive one took."""
    samples, rows, goals = Samples(), [], []
    for _ in range(rounds):
        alone = load.measure(ALONE, schedule, data, most, hurry)
        samples.add(ALONE, {"seconds": alone.seconds})
        runs = {}
        for mode in modes:
            try:
                given = runs[ADAPTIVE].seconds if even and mode == THRESHOLD and ADAPTIVE in runs else most
                runs[mode] = load.measure(mode, schedule, data, given, hurry)
            except tools.Failed as error:
                samples.add(mode, {"failed": "failed", "why": str(error)})
        if not runs:
            continue
        baseline = load.measure(BASELINE, schedule, data, max(run.end for run in runs.values()) + 0.2, hurry)
        busy = baseline.requests.busy(baseline.origin, baseline.origin + baseline.end)
        moved, took = baseline.guest_while(0, baseline.end)
        samples.add(
            BASELINE,
            {"bandwidth": moved / busy, "busy": busy / baseline.end, "p99_ms": guest.percentile(took, 0.99) * 1000},
        )
        for mode, each in runs.items():
            sample = each.beside(baseline)
            normal = runs.get(NORMAL)
            least = pauses_only(schedule, each.start, alone.seconds)
            sample["of_pauses"] = each.seconds / least if least and each.finished else None
            sample["runtime"] = each.seconds / normal.seconds if normal and normal.finished and each.finished else None
            samples.add(mode, sample)
    for mode in modes:
        rows.append(row(samples, mode, reported))
    for field, bound in bounds.items():
        what = {
            "bandwidth": "the guest's bandwidth ÷ without a job",
            "p99": "the guest's p99 latency ÷ without a job",
            "runtime": "the job's time ÷ the normal one's",
            "of_pauses": "the job's time ÷ the least with the pauses alone",
            "finished": "the job ends beside the guest (1: yes)",
        }[field]
        unit = "" if field == "finished" else "x"
        goals.append(report.limit(f"{title}, {ADAPTIVE}: {what}", middle(samples, ADAPTIVE, field), **bound, unit=unit))
    table = {
        "title": title,
        "text": text + setting(samples, data),
        "columns": [
            "job",
            "guest's bandwidth",
            "guest's p99",
            "p99, ms",
            "job's time, s",
            "time ÷ normal",
            "÷ pauses alone",
            "job runs",
            *(["dissertation: bandwidth", "dissertation: time ÷ normal"] if reported else []),
        ],
        "rows": rows,
    }
    figures = []
    if runs:
        panels = [baseline, *runs.values()]
        until = min(baseline.end, max(run.end for run in runs.values()))
        figures = [timeline.draw(f"live_chains-{name}.svg", f"{title}: its MB/s, the job's time shaded", panels, until)]
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if "why" in sample]
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": figures, "notes": notes}


def setting(samples, data):
    """What is measured on what, and what the columns say."""
    return (
        f"The guest: fio, {guest.BLOCK >> 10} KiB random reads and writes, half and half, queue depth {guest.DEPTH},"
        f" over NBD. The job: block-stream of {load.LAYERS - 1} layers, {data * load.FILL / 2**20:,.0f} MiB, into the"
        f" active one. All images lie on a simulated disk of {load.BANDWIDTH >> 20} MiB/s, 150 µs a request, 500 µs a"
        f" flush. With no guest the job takes {samples.text(ALONE, 'seconds', '{:.1f}')} s. Without a job the guest"
        f" moves {samples.text(BASELINE, 'bandwidth', '{:.0f}', 1e-6)} MB/s in its bursts, which are"
        f" {samples.text(BASELINE, 'busy', '{:.0f} %', 100)} of the time, with a p99 latency of"
        f" {samples.text(BASELINE, 'p99_ms', '{:.1f}')} ms. Bandwidth and latency are of the time that the job took,"
        " and ÷ those of the same part of the guest's schedule without a job. *Pauses alone*: a job that has the"
        " disk's full speed in every pause, and none of it in the bursts."
    )


def pauses_only(schedule, start, work):
    """How long a job takes from a time on that does `work` seconds of work in pauses alone; `None` if the
    schedule has not as many."""
    at = start
    for burst in schedule:
        if burst.end <= at:
            continue
        pause = max(burst.start - at, 0)
        if pause >= work:
            return at + work - start
        work -= pause
        at = burst.end
    return None


def middle(samples, mode, field):
    """The median of a field; of whether the job ended, as a number."""
    value = samples.median(mode, field)
    return None if value is None else float(value)


def row(samples, mode, reported):
    """A mode's row of the table."""
    done = samples.median(mode, "finished")
    took = samples.text(mode, "seconds", "{:.1f}")
    copied = samples.median(mode, "copied")
    cells = [
        mode,
        samples.text(mode, "bandwidth", "{:.2f}x"),
        samples.text(mode, "p99", "{:.2f}x"),
        samples.text(mode, "p99_ms", "{:.1f}"),
        took if done or copied is None else f"not done in {took}: {copied / 2**20:,.0f} MiB",
        samples.text(mode, "runtime", "{:.2f}x"),
        samples.text(mode, "of_pauses", "{:.2f}x"),
        samples.text(mode, "running", "{:.0f} %", 100),
    ]
    if reported:
        bandwidth, runtime = reported.get(mode, (None, None))
        cells += ["-" if bandwidth is None else f"{bandwidth:.2f}x", "-" if runtime is None else f"{runtime:.1f}x"]
    return cells
