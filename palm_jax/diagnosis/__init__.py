"""Why did a run spike? What short branches of it, each with one thing changed, say together.

  scores.py    a loss on fixed held-out sequences, step by step: did it spike, and how badly
  votes.py     how many of an arm's replicates spiked, and whether two arms differ
  verdict.py   the cause that the arms' votes leave

Arithmetic on recorded numbers; nothing here reads a run or executes a step.
"""
