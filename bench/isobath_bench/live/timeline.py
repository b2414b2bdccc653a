"""Pictures of runs over time: a panel for each, the guest's bandwidth as a line, the job's time shaded."""

from .. import plot

PANEL, GAP = 96, 34
SHADE = "#d55e00"


def draw(name, title, runs, until):
    """Draws runs one below another over the guest's time; gives the figure for a result."""
    height = plot.TOP + len(runs) * (PANEL + GAP) + plot.BOTTOM - GAP
    picture = plot.Picture(title, height)
    curves = [run.curve(until=min(until, run.end)) for run in runs]
    right = plot.WIDTH - plot.RIGHT
    x = plot.Axis([0, until], plot.LEFT, right, False)
    x.high = until
    most = max(value for curve in curves for _, value in curve)
    for number, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        top = plot.TOP + number * (PANEL + GAP) + 14
        bottom = top + PANEL
        y = plot.Axis([0, most], bottom, top, False)
        for start, end, share in shades(run.running(), until):
            left, width = x.place(start), x.place(end) - x.place(start)
            picture.parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{PANEL}" fill="{SHADE}"'
                f' fill-opacity="{0.45 * share:.2f}"/>'
            )
        for value in y.ticks()[0][::3]:
            picture.line(plot.LEFT, y.place(value), right, y.place(value))
            picture.text(plot.LEFT - 8, y.place(value) + 4, plot.number(value), anchor="end")
        path = " ".join(f"{x.place(at):.1f},{y.place(value):.1f}" for at, value in curve)
        picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{plot.COLOURS[0]}" stroke-width="1.4"/>')
        picture.line(plot.LEFT, bottom, right, bottom, "#222222")
        picture.line(plot.LEFT, top, plot.LEFT, bottom, "#222222")
        picture.text(plot.LEFT, top - 5, label(run), weight="bold")
    for value in x.ticks()[0]:
        if value <= until:
            picture.text(x.place(value), height - plot.BOTTOM + 33, f"{value:,g}", anchor="middle", size=12)
    picture.text((plot.LEFT + right) / 2, height - 6, "seconds", anchor="middle")
    picture.text(20, height / 2, "guest, MB/s", anchor="middle", turn=-90)
    picture.save(name)
    return {"title": title, "file": name}


def shades(running, until):
    """Parts of the time as they are shaded, neighbours that look alike in one."""
    found = []
    for start, end, share in running:
        start, end, share = max(start, 0), min(end, until), round(share, 1)
        if found and found[-1][2] == share:
            found[-1][1] = end
        elif end > start:
            found.append([start, end, share])
    return [each for each in found if each[2] > 0]


def label(run):
    """The run's name, and how long its job took."""
    if run.record is None:
        return run.mode
    return f"{run.mode}: {run.seconds:.1f} s" + ("" if run.finished else ", not done")
