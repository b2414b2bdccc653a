"""What is measured round by round."""

import statistics

from . import servers, tools


class Samples(dict):
    """Samples by key; a crash stays on record in place of them."""

    def add(self, key, sample):
        self.setdefault(key, []).append(sample)

    def attempt(self, key, measure):
        """Adds what `measure` gives, or that it failed; does not repeat what crashed."""
        if self.failure(key):
            return
        try:
            self.add(key, measure())
        except tools.Failed as error:
            what = "crashed" if isinstance(error, servers.Crashed) else "failed"
            self.add(key, {"failed": what, "why": str(error)})

    def failure(self, key):
        return next((sample["failed"] for sample in self.get(key, ()) if "failed" in sample), None)

    def median(self, key, field):
        """The median of a field; `None` where nothing was measured."""
        values = [sample[field] for sample in self.get(key, ()) if sample.get(field) is not None]
        return statistics.median(values) if values and not self.failure(key) else None

    def text(self, key, field, form="{:,.0f}", factor=1.0):
        """The median for a table, or what became of it."""
        value = self.median(key, field)
        return self.failure(key) or "-" if value is None else form.format(value * factor)

    def raw(self):
        """As JSON keeps them."""
        return {" / ".join(map(str, key if isinstance(key, tuple) else (key,))): each for key, each in self.items()}


def by_case(rounds, cases, names, measure):
    """Samples of each case, a tuple, by each name, under the key of both: the names in another order each round.

    `names` may be a function of the case.
    """
    samples = Samples()
    of = names if callable(names) else lambda _: names
    for number in range(rounds):
        for case in cases:
            for name in rotated(of(case), number):
                samples.attempt((*case, name), lambda: measure(*case, name))
    return samples


def rotated(items, number):
    """The items in another order each round."""
    number %= max(len(items), 1)
    return items[number:] + items[:number]
