"""Ratios within rounds, and what tables and goals have in common."""

import statistics

from .. import report

PAGE_CACHE, DIRECT = "page cache", "O_DIRECT"


def ratio(samples, key, peer, field):
    """The median over the rounds of one's figure ÷ its peer's; `None` where either is missing."""
    pairs = pairs_of(samples, key, peer, field)
    return (
        statistics.median(one / other for one, other in pairs) if pairs and all(other for _, other in pairs) else None
    )


def more(samples, key, peer, field):
    """The median over the rounds of what one's figure has more than its peer's."""
    pairs = pairs_of(samples, key, peer, field)
    return statistics.median(one - other for one, other in pairs) if pairs else None


def pairs_of(samples, key, peer, field):
    if samples.failure(key) or samples.failure(peer):
        return []
    return [(one[field], other[field]) for one, other in zip(samples.get(key, ()), samples.get(peer, ()))]


def text(value, form="{:.2f}x"):
    return "-" if value is None else form.format(value)


def goal(samples, what, key, peer, field, **bound):
    """A ratio within rounds against what is to be reached."""
    why = samples.failure(key) or samples.failure(peer)
    return report.limit(what, ratio(samples, key, peer, field), why=why, **bound)


def failures(samples):
    """Why what failed did, as notes; the same reason once."""
    whose = {}
    for key, each in samples.items():
        for sample in each:
            if sample.get("failed"):
                whose.setdefault(sample["why"], []).append(
                    ", ".join(map(str, key if isinstance(key, tuple) else (key,)))
                )
    return [f"{'; '.join(keys)}: {why}" for why, keys in whose.items()]


def part(samples, tables, goals, figures=()):
    """What a part gives."""
    return {
        "samples": samples.raw(), "tables": tables, "goals": goals, "figures": list(figures),
        "notes": failures(samples),
    }  # fmt: skip
