"""Losses that leave their course: what is an incident, and what is done about it.

  robust.py      level and spread of a window that some outliers are in
  incidents.py   an incident from its onset to its outcome
  ranges.py      vitals that go bad before the loss does
  detection.py   the fold over a run's steps that finds all of these
  policy.py      what to do about an incident
  history.py     the steps and decisions of a run, from its logbook

All but the last are pure arithmetic on logged numbers, no JAX, no files. They use +, -, *, /,
square roots and comparisons of Python's floats alone, which give the same bits on every
machine: what is decided from a logbook today is what was decided when it was written.
"""
