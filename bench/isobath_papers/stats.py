"""What samples come to: medians, spreads, ratios within a round."""

import statistics


def spread_text(spread):
    """A spread for a table."""
    return "-" if spread is None else f"±{spread * 100:.0f} %"


class Results:
    """What is on record of an experiment: samples by key and round."""

    def __init__(self, paper, name, profile, records):
        self.paper = paper
        self.name = name
        self.profile = profile
        self._rounds = {}
        for record in records:
            self._rounds.setdefault(tuple(record["key"]), {})[record["round"]] = record["sample"]

    def keys(self):
        return list(self._rounds)

    def samples(self, key):
        """The samples that were measured, in the order of their rounds."""
        rounds = self._rounds.get(tuple(key), {})
        return [rounds[number] for number in sorted(rounds) if "failed" not in rounds[number]]

    def failure(self, key):
        """What became of a point of which nothing could be measured."""
        rounds = self._rounds.get(tuple(key), {})
        failed = [sample for sample in rounds.values() if "failed" in sample]
        return failed[-1]["failed"] if failed and not self.samples(key) else None

    def failures(self):
        """All failures on record, as text."""
        return [
            f"{' / '.join(map(str, key))}, round {number + 1}: {sample['why']}"
            for key, rounds in self._rounds.items()
            for number, sample in sorted(rounds.items())
            if "failed" in sample
        ]

    def values(self, key, field):
        """A field's values over the rounds."""
        return [sample[field] for sample in self.samples(key) if sample.get(field) is not None]

    def median(self, key, field):
        """The median of a field; `None` where nothing was measured."""
        values = self.values(key, field)
        return statistics.median(values) if values else None

    def spread(self, key, field):
        """Half the range between the extremes, as a part of the median; `None` of less than two."""
        values = self.values(key, field)
        middle = statistics.median(values) if values else 0
        return (max(values) - min(values)) / 2 / abs(middle) if len(values) > 1 and middle else None

    def ratios(self, key, other, field):
        """One ÷ the other in each round that has both; where there is none, the medians' ratio."""
        one, two = (self._rounds.get(tuple(each), {}) for each in (key, other))
        pairs = [(one[number].get(field), two[number].get(field)) for number in sorted(one.keys() & two.keys())]
        found = [a / b for a, b in pairs if a is not None and b]
        if not found:
            a, b = self.median(key, field), self.median(other, field)
            found = [a / b] if a is not None and b else []
        return found

    def ratio(self, key, other, field):
        """The median of the rounds' ratios; `None` where either was not measured."""
        found = self.ratios(key, other, field)
        return statistics.median(found) if found else None

    def ratio_spread(self, key, other, field):
        """Half the range of the rounds' ratios, as a part of their median."""
        found = self.ratios(key, other, field)
        return (max(found) - min(found)) / 2 / abs(statistics.median(found)) if len(found) > 1 else None

    def text(self, key, field, form="{:,.0f}", factor=1.0):
        """The median for a table, or what became of it."""
        value = self.median(key, field)
        return self.failure(key) or "-" if value is None else form.format(value * factor)

    def spread_text(self, key, field):
        """A field's spread for a table."""
        return spread_text(self.spread(key, field))

    def ratio_text(self, key, other, field):
        """The ratio of two points for a table."""
        value = self.ratio(key, other, field)
        return "-" if value is None else f"{value:.2f}x"
