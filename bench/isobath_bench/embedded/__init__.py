"""The parts of the scenario `embedded`, a module each.

Each has `run(rounds, seconds)`, which gives a dict of `samples` (raw), `tables`, `goals`, `figures`
and `notes`; those that are measured on one of several disks have a class with that function.
"""
