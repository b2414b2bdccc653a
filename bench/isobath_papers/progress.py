"""How far a run is: a bar on a terminal, now and then a line elsewhere."""

import sys
import time

WIDTH = 28
# Seconds between lines where there is no terminal.
PAUSE = 20


class Progress:
    """Counts measurements, and tells of them on stderr."""

    def __init__(self, total):
        self.total = total
        self.done = 0
        self.bar = sys.stderr.isatty()
        self.told = 0.0
        self.length = 0

    def step(self):
        self.done += 1

    def show(self, what, left):
        """What is being measured, and the seconds that all the rest may take."""
        now = time.monotonic()
        if not self.bar and now - self.told < PAUSE:
            return
        self.told = now
        filled = WIDTH * self.done // max(self.total, 1)
        text = f"{self.done}/{self.total}, about {duration(left)} left: {what}"
        if self.bar:
            text = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {text}"[:150]
            sys.stderr.write("\r" + text.ljust(self.length))
            self.length = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def note(self, text):
        """A line that stays."""
        if self.bar and self.length:
            sys.stderr.write("\r" + " " * self.length + "\r")
            self.length = 0
        print(text, file=sys.stderr, flush=True)

    def close(self):
        if self.bar and self.length:
            sys.stderr.write("\n")


def duration(seconds):
    """Hours and minutes, or minutes, or seconds."""
    if seconds >= 5400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"
    return f"{round(seconds / 60)} min" if seconds >= 90 else f"{round(seconds)} s"
