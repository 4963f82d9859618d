"""How the processes of one run meet: what the environment says of them, and JAX's service.

Nothing here may import JAX at the top; see start.py.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import os
import re
import socket
import sys
from typing import Any, NoReturn

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput

# Set for each process of a run that has several. Hosts of a TPU slice find each other without.
COORDINATOR, NUM_PROCESSES, PROCESS = (
    "JAX_COORDINATOR_ADDRESS",  # host:port of process 0
    "PALM_JAX_NUM_PROCESSES",
    "PALM_JAX_PROCESS_ID",
)
_ALONE = f"{NUM_PROCESSES}=1 {PROCESS}=0 {COORDINATOR}=localhost:8476"


def announced() -> tuple[str, int, int] | None:
    """Coordinator, number of processes and this one's, from the environment; None: not said.

    Raises:
      WrongInput: they are incomplete, or no such numbers.
    """
    if NUM_PROCESSES not in os.environ:
        if PROCESS in os.environ:
            raise incomplete(f"{PROCESS}={os.environ[PROCESS]} is set", NUM_PROCESSES)
        return None
    for name in (COORDINATOR, PROCESS):
        if name not in os.environ:
            raise incomplete(f"{NUM_PROCESSES}={os.environ[NUM_PROCESSES]} is set", name)
    address, count, index = (os.environ[name] for name in (COORDINATOR, NUM_PROCESSES, PROCESS))
    if not re.fullmatch("[1-9][0-9]*", count):
        raise WrongInput(f"{NUM_PROCESSES}={count!r} must be a whole number from 1 on")
    if not re.fullmatch("[0-9]+", index) or int(index) >= int(count):
        raise WrongInput(
            f"{PROCESS}={index!r} must be a whole number from 0 to {int(count) - 1}, because "
            f"{NUM_PROCESSES}={count}"
        )
    if not re.fullmatch(r"\S+:[0-9]+", address):
        raise WrongInput(f"{COORDINATOR}={address!r} must be host:port, such as 10.0.0.2:8476")
    return address, int(count), int(index)


def incomplete(given: str, missing: str) -> WrongInput:
    return WrongInput(
        f"{given}, but not {missing}: several processes need {COORDINATOR}=host:port, "
        f"{NUM_PROCESSES} and {PROCESS}=0.., one process none of them"
    )


def check_host(waits: config.Distributed) -> None:
    """Raise CannotDo if `distributed.denied_hosts` names this one."""
    if (host := socket.gethostname()) in waits.denied_hosts:
        raise CannotDo(
            f"this is {host}, which distributed.denied_hosts={list(waits.denied_hosts)} names; "
            "give the run another host"
        )


def meet(address: str, count: int, index: int, waits: config.Distributed) -> None:
    """Meet the other processes that the environment announces."""
    try:
        # Detection would ask a cluster's services for what none of this needs.
        _initialize(
            waits,
            coordinator_address=address,
            num_processes=count,
            process_id=index,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise CannotDo(
            f"process {index} of {count} could not meet the others at {COORDINATOR}={address}: "
            f"{_first_line(error)}. Process 0 must run on that host, its port must be free and "
            f"open, and all must start within {_start_timeout(waits)}"
        ) from error


def meet_tpu_hosts(waits: config.Distributed) -> None:
    """Meet the other hosts of this TPU slice, or of several. A lone host meets itself."""
    try:
        # JAX asks Google Cloud's metadata server, or the variables that GKE sets.
        _initialize(waits)
    except ValueError as error:
        raise CannotDo(
            "JAX_PLATFORMS names tpu, but this is no TPU VM that JAX knows the hosts of "
            f"({_first_line(error)}). Elsewhere leave tpu out of it; a lone host with a TPU can "
            f"also say {_ALONE}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotDo(
            f"could not meet the hosts of this TPU slice: {_first_line(error)}. It needs the "
            "package requests, the metadata server and port 8482 between the hosts, and the same "
            f"command on all of them within {_start_timeout(waits)}; a lone host can also say "
            f"{_ALONE}"
        ) from error


def _start_timeout(waits: config.Distributed) -> str:
    return f"distributed.start_timeout_s={waits.start_timeout_s} seconds"


_waits: config.Distributed | None = None


def have_met() -> bool:
    """Whether this process belongs to several; asks no device."""
    return _waits is not None


def waits() -> config.Distributed:
    """How long the processes of this run wait for each other."""
    assert _waits is not None, "start() has met no other process"
    return _waits


def leave(code: int) -> NoReturn:
    """End this process without the farewell for which JAX would wait for its peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _initialize(waits: config.Distributed, **arguments: Any) -> None:
    global _waits
    import jax

    _waits = waits
    # Gloo prints to the process's standard output, which belongs to what was asked for.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # It would answer SIGTERM itself, and the signal that saves a run would never arrive.
    jax.config.update("jax_enable_preemption_service", False)
    with _missing_processes_named(waits.start_timeout_s):
        jax.distributed.initialize(
            # Longer than the service waits, which knows who is missing, and says so to all.
            initialization_timeout=waits.start_timeout_s + 30,
            heartbeat_timeout_seconds=waits.timeout_s,
            shutdown_timeout_seconds=waits.timeout_s,
            **arguments,
        )


@contextlib.contextmanager
def _missing_processes_named(seconds: int) -> collections.abc.Iterator[None]:
    """Let the coordination service give up by itself, naming those that did not come.

    JAX starts it with an hour's patience, which no argument changes; its clients give up before,
    and know nothing.
    """
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    usual = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = functools.partial(
        usual, cluster_register_timeout=seconds
    )
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = usual


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
