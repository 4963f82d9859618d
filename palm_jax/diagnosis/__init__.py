"""Why did a run spike? What short branches of it, each with one thing changed, say together.

  arms.py        what may be executed: each arm's state, data, clocks and treatment
  feeds.py       the data of an arm
  experiment.py  executes an arm
  scores.py      a loss on fixed held-out sequences, step by step: did it spike, and how badly
  votes.py       how many of an arm's replicates spiked, and whether two arms differ
  verdict.py     the cause that the arms' votes leave
  procedure.py   from results to votes, verdict and the arm to execute next
  treatments.py  what may be done about it, and the commands that do it
  leading.py     which vital left its range first
  forensics.py   the suspect sequences beside others (texts.py: what is unusual about a text)
  scan.py        unusual text elsewhere in what a run is fed
  casefile.py    the diagnosis's folder
  written.py     what its files hold
  diagnose.py    all of it, for one spike of a run

Scores, votes, verdict and procedure are arithmetic on recorded numbers. Only experiment.py and
forensics.py execute anything, and nothing writes to the run but to its folder `diagnoses`.
"""
