"""Flame graphs: samples of `perf record` folded to stacks, and drawn as SVG.

The wider a frame, the more samples have it; frames lie on those that called them. Names of threads are at the bottom.
"""

import re
import subprocess
from html import escape

from . import tools

WIDTH, ROW, TOP, BOTTOM = 1200, 17, 44, 14
# A frame that is narrower is left out, in pixels; a letter's width, to tell how many fit.
NARROWEST, LETTER = 0.3, 6.6
# A sample's first line: the thread's name, its ids, the time, and how much the sample counts.
HEAD = re.compile(r"^(?P<thread>\S.*?)\s+\d+(?:/\d+)?\s+[\d.]+:\s+(?P<count>\d+)?\s*(?P<event>\S+):")
FRAME = re.compile(r"^\s+[0-9a-f]+ (?P<symbol>.+?)(?:\+0x[0-9a-f]+)? \((?P<module>.*)\)$")
# The hash that ends a Rust symbol.
HASH = re.compile(r"::h[0-9a-f]{16}$")
# What is the same everywhere, and says nothing.
IGNORED = {"[unknown]"}


def record(output, command=None, pid=None, seconds=10, frequency=997):
    """Records a program, or one that runs already for some seconds; gives what perf says of it.

    Stacks are unwound by debug information: optimised programs keep no frame pointers.
    """
    target = command or ["sleep", str(seconds)]
    whom = [f"--pid={pid}"] if pid else []
    how = ["--quiet", f"--freq={frequency}", "-g", "--call-graph=dwarf,16384", f"--event={event()}"]
    done = subprocess.run(["perf", "record", *how, f"--output={output}", *whom, "--", *target])
    if done.returncode != 0 and not command:
        raise tools.Failed(f"perf record ended with {done.returncode}")
    return tools.run("perf", "script", "--no-inline", f"--input={output}")


def event():
    """The processor's cycles, or where it does not tell them, as in most virtual machines, a clock."""
    tried = subprocess.run(["perf", "stat", "--event=cycles", "true"], capture_output=True, text=True)
    return "cpu-clock" if "not supported" in tried.stderr or tried.returncode else "cycles"


def name(symbol, module):
    """What a frame is called: kernel functions are marked."""
    symbol = HASH.sub("", symbol)
    return f"{symbol}_[k]" if module.startswith("[kernel") or module.endswith(".ko") else symbol


def fold(script):
    """Counts by stack, from the outermost frame in, out of what `perf script` prints."""
    stacks = {}
    thread, frames, weight = None, [], 1

    def end():
        if thread is not None:
            stack = (thread, *reversed(frames))
            stacks[stack] = stacks.get(stack, 0) + weight

    for line in script.splitlines():
        if head := HEAD.match(line):
            end()
            thread, frames = head["thread"], []
            weight = int(head["count"] or 1)
        elif (frame := FRAME.match(line)) and frame["symbol"] not in IGNORED:
            frames.append(name(frame["symbol"], frame["module"]))
    end()
    return stacks


def tree(stacks):
    """The stacks as nested frames: `[count, {name: frame}]`."""
    root = [0, {}]
    for stack, count in stacks.items():
        root[0] += count
        frame = root
        for each in stack:
            frame = frame[1].setdefault(each, [0, {}])
            frame[0] += count
    return root


def depth(frame, per_sample):
    """Rows that a frame needs for what lies on it and is wide enough to be seen."""
    wide = [child for child in frame[1].values() if child[0] * per_sample >= NARROWEST]
    return 1 + max((depth(child, per_sample) for child in wide), default=0)


def colour(symbol):
    """Kernel frames are orange, Isobath's blue, others yellow; neighbours differ a little."""
    shade = sum(map(ord, symbol)) % 30
    if symbol.endswith("_[k]"):
        return f"hsl(22,80%,{62 + shade // 3}%)"
    if "isobath" in symbol:
        return f"hsl(205,60%,{66 + shade // 3}%)"
    return f"hsl(48,75%,{66 + shade // 3}%)"


def render(stacks, title):
    """The flame graph as SVG; a frame's part of all samples shows where the mouse rests."""
    root = tree(stacks)
    if not root[0]:
        raise tools.Failed("there are no samples")
    per_sample = (WIDTH - 20) / root[0]
    height = TOP + BOTTOM + ROW * depth(root, per_sample)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="Menlo, Consolas, monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]

    def draw(symbol, frame, left, row):
        width = frame[0] * per_sample
        y = height - BOTTOM - ROW * (row + 1)
        told = f"{symbol} ({frame[0] / root[0]:.2%})"
        parts.append(
            f'<g><title>{escape(told)}</title><rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 1}" '
            f'fill="{colour(symbol)}"/>'
        )
        letters = int((width - 4) / LETTER)
        if letters >= 3:
            shown = symbol if len(symbol) <= letters else symbol[: letters - 1] + "…"
            parts.append(f'<text x="{left + 2:.2f}" y="{y + 12}">{escape(shown)}</text>')
        parts.append("</g>")
        for child in sorted(frame[1]):
            if frame[1][child][0] * per_sample >= NARROWEST:
                draw(child, frame[1][child], left, row + 1)
            left += frame[1][child][0] * per_sample

    draw("all", root, 10, 0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def heaviest(stacks, count=25):
    """The functions with most samples of their own, and those on most stacks, as lines of text."""
    total = sum(stacks.values()) or 1
    own, all_in_all = {}, {}
    for stack, weight in stacks.items():
        own[stack[-1]] = own.get(stack[-1], 0) + weight
        for symbol in set(stack):
            all_in_all[symbol] = all_in_all.get(symbol, 0) + weight
    ranked = sorted(own, key=own.get, reverse=True)[:count]
    return [f"{own[symbol] / total:7.2%} {all_in_all[symbol] / total:7.2%}  {symbol}" for symbol in ranked]
