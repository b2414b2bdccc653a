"""The parts of the scenario `chain_depth`, a module each.

Each has `run(rounds, seconds)`, which gives a dict of `samples` (raw), `tables`, `goals`, `figures`
and `notes`.
"""
