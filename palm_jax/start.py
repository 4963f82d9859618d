"""What must be set before JAX first looks at its devices, from the config.

Nothing here may import JAX at the top: the caller imports the rest of the package afterwards.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.tpu import topologies

# Set for each process of a run that has several. Hosts of a TPU slice find each other without.
COORDINATOR, NUM_PROCESSES, PROCESS = (
    "JAX_COORDINATOR_ADDRESS",  # host:port of process 0
    "PALM_JAX_NUM_PROCESSES",
    "PALM_JAX_PROCESS_ID",
)
_EMULATED = "--xla_force_host_platform_device_count"
_ALONE = f"{NUM_PROCESSES}=1 {PROCESS}=0 {COORDINATOR}=localhost:8476"


def start(settings: config.Config) -> None:
    """Pin the thread pool, emulate devices if asked, meet other processes, and, where it is
    safe, keep what is compiled.

    XLA:CPU splits contractions by the size of its thread pool, and so chooses their bits by
    it. NPROC sets that size, whatever the number of cores, when the devices are first used.

    Raises:
      WrongInput: a variable that describes several processes is missing or wrong.
      CannotDo: the other processes cannot be met.
    """
    assert "palm_jax.step" not in sys.modules, "start() comes before anything that uses JAX"
    several = _announced()
    os.environ["NPROC"] = str(settings.numerics.threads)
    if settings.mesh.emulated_devices is not None:
        _emulate(settings.mesh.emulated_devices, 1 if several is None else several[1])
    # Warnings of XLA's loader about processor features it does not use.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # JAX's documentation lets an empty one stand for none, but then it overlooks the TPU.
    if os.environ.get("JAX_PLATFORMS") == "":
        del os.environ["JAX_PLATFORMS"]

    import jax

    # Otherwise the kernels inside a module would name the files they come from, and the
    # module's digest would depend on where JAX is installed.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")
    # JAX says "tpu,cpu" by itself when it sees a TPU and libtpu; none: it will try what it has.
    platforms = (jax.config.jax_platforms or "").split(",")  # type: ignore[attr-defined]
    if platforms == [""]:
        for name, value in topologies.NO_TPU.items():
            os.environ.setdefault(name, value)
    if several is not None:
        _meet(*several)
    elif "tpu" in platforms:
        _meet_tpu_hosts()
    elif COORDINATOR in os.environ:
        raise _incomplete(f"{COORDINATOR} is set", NUM_PROCESSES)
    precision = matmul_precision(settings.precision, platforms[0])  # where it will compute
    if precision is not None:
        jax.config.update("jax_default_matmul_precision", precision)
    if _may_keep(platforms[0], alone=several is None):
        # The size of the pool is not part of XLA's own key, so it is part of the folder.
        jax.config.update("jax_compilation_cache_dir", str(compiled_folder(settings)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _may_keep(platform: str, alone: bool) -> bool:
    """Whether programs read from a folder of compiled ones may be executed.

    Not on several CPU devices (seen with jax 0.10.2). XLA:CPU reads a program without the order
    in which collectives inside a loop and outside of it follow each other: devices meet in
    different ones, and wait forever, or one writes past the end of the other's buffer.
    """
    if platform not in ("", "cpu"):
        return True
    emulated = re.findall(rf"{_EMULATED}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return alone and (not emulated or emulated[-1] == "1")


def matmul_precision(precision: config.Precision, platform: str) -> str | None:
    """`jax_default_matmul_precision` with which the policy means what it says on a platform.

    XLA multiplies float32 in bfloat16 on a TPU unless told otherwise, in the module itself.
    A CPU has one way, and is told nothing, so that its modules stay what they are.
    """
    return "highest" if precision.policy == "float32" and platform == "tpu" else None


def cache_folder() -> pathlib.Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "palm_jax"


def compiled_folder(settings: config.Config) -> pathlib.Path:
    """Where compiled programs are kept; it need not exist."""
    return cache_folder() / f"compiled-for-{settings.numerics.threads}-threads"


def _emulate(num_devices: int, num_processes: int) -> None:
    if num_devices % num_processes:
        raise WrongInput(
            f"mesh.emulated_devices={num_devices} does not divide by {NUM_PROCESSES}="
            f"{num_processes}; each process emulates an equal part"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    others = re.sub(rf"{_EMULATED}=\S+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{others} {_EMULATED}={num_devices // num_processes}".strip()


def _announced() -> tuple[str, int, int] | None:
    """Coordinator, number of processes and this one's, from the environment; None: not said.

    Raises:
      WrongInput: they are incomplete, or no such numbers.
    """
    if NUM_PROCESSES not in os.environ:
        if PROCESS in os.environ:
            raise _incomplete(f"{PROCESS}={os.environ[PROCESS]} is set", NUM_PROCESSES)
        return None
    for name in (COORDINATOR, PROCESS):
        if name not in os.environ:
            raise _incomplete(f"{NUM_PROCESSES}={os.environ[NUM_PROCESSES]} is set", name)
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


def _incomplete(given: str, missing: str) -> WrongInput:
    return WrongInput(
        f"{given}, but not {missing}: several processes need {COORDINATOR}=host:port, "
        f"{NUM_PROCESSES} and {PROCESS}=0.., one process none of them"
    )


def _meet(address: str, count: int, index: int) -> None:
    """Meet the other processes that the environment announces."""
    try:
        # Detection would ask a cluster's services for what none of this needs.
        _initialize(
            coordinator_address=address,
            num_processes=count,
            process_id=index,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise CannotDo(
            f"process {index} of {count} could not meet the others at {COORDINATOR}={address}: "
            f"{_first_line(error)}. Process 0 must run on that host, its port must be free and "
            "open, and all must start within five minutes"
        ) from error


def _meet_tpu_hosts() -> None:
    """Meet the other hosts of this TPU slice, or of several. A lone host meets itself."""
    try:
        # JAX asks Google Cloud's metadata server, or the variables that GKE sets.
        _initialize()
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
            f"command on all of them within five minutes; a lone host can also say {_ALONE}"
        ) from error


def _initialize(**arguments: Any) -> None:
    import jax

    # Gloo prints to the process's standard output, which belongs to what was asked for.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # It would answer SIGTERM itself, and the signal that saves a run would never arrive.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**arguments)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
