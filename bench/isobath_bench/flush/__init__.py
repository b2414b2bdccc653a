"""The parts of the scenario `flush_cost`, a module each.

Each has `run(rounds, seconds)`, which gives a dict of `samples` (raw), `tables`, `goals`, `figures`
and `notes`.
"""
