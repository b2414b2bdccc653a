"""Pictures of results, as SVG: lines and bars, with linear or logarithmic axes."""

import math
from html import escape

from . import report

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 52, 56
# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
DASHES = ["", "7 4", "2 3", "9 3 2 3"]


class Axis:
    """Values to places between two ends."""

    def __init__(self, values, start, end, log, zero=True):
        self.log = log
        self.start, self.end = start, end
        low, high = min(values), max(values)
        if log:
            self.low, self.high = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
            self.high = max(self.high, self.low + 1)
        else:
            step = self.step = nice_step((high - (0 if zero else low)) or abs(high) or 1)
            self.low = 0 if zero and low >= 0 else math.floor(low / step) * step
            self.high = math.ceil(high / step - 1e-9) * step

    def place(self, value):
        at = math.log10(value) if self.log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self):
        """Values to label, and values to mark only."""
        if not self.log:
            count = round((self.high - self.low) / self.step)
            return [self.low + number * self.step for number in range(count + 1)], []
        decades = [10.0**power for power in range(self.low, self.high + 1)]
        minor = [decade * digit for decade in decades[:-1] for digit in range(2, 10)]
        if self.high - self.low > 2:
            return decades, minor
        both = sorted(decades + [decade * digit for decade in decades[:-1] for digit in (2, 5)])
        return both, minor


def nice_step(span):
    """A step of 1, 2 or 5 times a power of ten, about a sixth of the span."""
    power = 10 ** math.floor(math.log10(span / 6))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= span / 6 * 0.999)


def number(value):
    """A value as an axis shows it."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


class Picture:
    """SVG elements, and text in one font."""

    def __init__(self, title, height=HEIGHT, left=LEFT):
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]
        self.text(left, 26, title, size=16, weight="bold")

    def text(self, x, y, text, *, anchor="start", size=13, weight="normal", colour="#222222", turn=None):
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}" fill="{colour}"{turned}>{escape(str(text))}</text>'
        )

    def line(self, x1, y1, x2, y2, colour="#d8d8d8", width=1.0):
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
        )

    def save(self, name):
        report.RESULTS.mkdir(exist_ok=True)
        (report.RESULTS / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def lines(name, title, x_label, y_label, series, *, log_x=False, log_y=False, x_ticks=None):
    """Draws series of points, `{name: [(x, y), ...]}`; gives the figure for a result."""
    series = {name: [point for point in points if point[1] is not None] for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    points = [point for each in series.values() for point in each]
    if not points:
        return None
    picture = Picture(title)
    x_axis = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log_x, zero=False)
    legend_rows = (len(series) + 2) // 3
    top = TOP + 20 * legend_rows - 6
    y_axis = Axis([y for _, y in points], HEIGHT - BOTTOM, top, log_y)
    bottom = HEIGHT - BOTTOM
    major, minor = y_axis.ticks()
    for value in minor:
        picture.line(LEFT, y_axis.place(value), WIDTH - RIGHT, y_axis.place(value), "#f0f0f0")
    for value in major:
        picture.line(LEFT, y_axis.place(value), WIDTH - RIGHT, y_axis.place(value))
        picture.text(LEFT - 8, y_axis.place(value) + 4, number(value), anchor="end")
    for value in x_ticks or x_axis.ticks()[0]:
        picture.line(x_axis.place(value), top, x_axis.place(value), bottom)
        picture.text(x_axis.place(value), bottom + 19, f"{value:,g}", anchor="middle")
    picture.line(LEFT, bottom, WIDTH - RIGHT, bottom, "#222222")
    picture.line(LEFT, top, LEFT, bottom, "#222222")
    picture.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label + log_note(log_x), anchor="middle")
    picture.text(20, (top + bottom) / 2, y_label + log_note(log_y), anchor="middle", turn=-90)
    for index, (label, each) in enumerate(series.items()):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in each]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        stroke = f'fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"'
        picture.parts.append(f'<polyline points="{path}" {stroke}/>')
        if len(places) <= 20:
            picture.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{colour}"/>' for x, y in places]
        x, y = LEFT + index % 3 * 220, TOP - 4 + index // 3 * 20
        picture.parts.append(f'<polyline points="{x},{y - 4} {x + 26},{y - 4}" {stroke}/>')
        picture.text(x + 32, y, label)
    picture.save(name)
    return {"title": title, "file": name}


def bars(name, title, x_label, groups, *, log=False, unit=""):
    """Draws horizontal bars, `{group: {label: value}}`; gives the figure for a result."""
    groups = {group: {k: v for k, v in each.items() if v is not None} for group, each in groups.items()}
    groups = {group: each for group, each in groups.items() if each}
    if not groups:
        return None
    left, row, gap = 200, 22, 30
    count = sum(map(len, groups.values()))
    height = TOP + count * row + len(groups) * gap + BOTTOM
    picture = Picture(title, height, left=16)
    bottom = height - BOTTOM
    axis = Axis([v for each in groups.values() for v in each.values()], left, WIDTH - RIGHT - 70, log)
    if log:
        # Room for the shortest bar.
        axis.low -= 0 if min(v for each in groups.values() for v in each.values()) > 10**axis.low * 1.5 else 1
    for value in axis.ticks()[0]:
        picture.line(axis.place(value), TOP - 8, axis.place(value), bottom)
        picture.text(axis.place(value), bottom + 19, number(value), anchor="middle")
    labels = list(dict.fromkeys(label for each in groups.values() for label in each))
    y = TOP
    for group, each in groups.items():
        picture.text(16, y + 12, group, weight="bold")
        y += gap - 8
        for label, value in each.items():
            colour = COLOURS[labels.index(label) % len(COLOURS)]
            width = max(axis.place(value) - left, 1)
            picture.text(left - 8, y + 13, label, anchor="end")
            picture.parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{row - 6}" fill="{colour}"/>')
            picture.text(left + width + 6, y + 13, f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}")
            y += row
        y += 8
    picture.line(left, TOP - 8, left, bottom, "#222222")
    picture.text((left + WIDTH - RIGHT) / 2, height - 14, x_label + log_note(log), anchor="middle")
    picture.save(name)
    return {"title": title, "file": name}


def log_note(log):
    return " (logarithmic)" if log else ""
