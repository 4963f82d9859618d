"""What a keeper makes of the end of a training process. XLA's texts are those of jax 0.10.2."""

from __future__ import annotations

import pytest

from palm_jax.supervise.endings import Life, ending

ABORTED, KILLED = -6, -9
UNHEALTHY = """\
E1130 13:50:56.5 1 coordination_service.cc:1549] Use error polling to propagate the following \
error to all tasks: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
3
1
The tasks have crashed. Check the task logs for an earlier error
F1130 13:50:56.5 1 client.h:80] Terminating process because the JAX distributed service detected
"""
MISSING = """\
F1130 client.h:80] Terminating process because the JAX distributed service detected fatal errors. \
absl::Status: DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0.
# of tasks that reached the barrier: 1/3.
The first task at the barrier: 0. Some timed out task names:
2
1


RPC: /xla.coordination.CoordinationService/RegisterTask
"""
NO_SERVICE = """\
F1130 client.h:80] Terminating process because the JAX distributed service detected fatal errors. \
absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/RegisterTask
"""
SERVICE_LOST = """\
F1130 client.h:80] absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either \
the leader task was preempted/died/restarted unexpectedly
"""
SERVICE_SILENT = """\
F1130 client.h:80] absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/Heartbeat
"""
TWICE = """\
F1130 client.h:80] absl::Status: ALREADY_EXISTS: Aborted connect attempt as there is a request \
from a newer incarnation.

RPC: /xla.coordination.CoordinationService/RegisterTask
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (UNHEALTHY, "no sign of life from processes 1, 3"),
        (MISSING, "processes 1, 2 did not start within 15 s"),
        (NO_SERVICE, "process 0 was not found within 15 s"),
        (SERVICE_LOST, "no sign of life from process 0"),
        (SERVICE_SILENT, "no sign of life from process 0"),
        (TWICE, "another process has the same number"),
    ],
)
def test_abort_over_a_lost_process_names_it(text, says):
    found = ending(Life(ABORTED, text, waits=" within 15 s"))
    assert says in found.cause
    assert (found.exit_code, found.again) == (6, True)


@pytest.mark.parametrize(
    ("life", "code", "again"),
    [
        (Life(0), 0, False),
        (Life(1), 1, False),
        (Life(2), 2, False),
        (Life(3), 3, True),
        (Life(4, told_to_stop=True), 4, False),
        (Life(4), 4, True),
        (Life(5), 5, True),
        (Life(6), 6, True),
        (Life(77), 77, True),
        (Life(ABORTED, "F1130 something.cc:1] Check failed"), 134, True),
        (Life(KILLED), 137, True),
        (Life(-11), 139, True),
    ],
)
def test_exit_code_is_passed_on_and_says_whether_to_start_again(life, code, again):
    found = ending(life)
    assert (found.exit_code, found.again) == (code, again)


@pytest.mark.parametrize(
    ("life", "says"),
    [
        (Life(KILLED, out_of_memory=True), "want of memory"),
        (Life(KILLED, silent_s=70.2), "hung: no news for 70 s"),
        (Life(KILLED), "killed by SIGKILL"),
        (Life(-64 - 300), "signal 364"),
        (Life(4), "preemption"),
    ],
)
def test_cause_tells_a_kill_from_a_hang_from_want_of_memory(life, says):
    assert says in ending(life).cause
