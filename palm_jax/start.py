"""What must be set before JAX first looks at its devices, from the config.

Nothing here may import JAX at the top: the caller imports the rest of the package afterwards.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

from palm_jax import config
from palm_jax.errors import WrongInput

# Set for each process of a run that has several (on TPU VMs nothing needs to be set).
COORDINATOR, NUM_PROCESSES, PROCESS = (
    "JAX_COORDINATOR_ADDRESS",  # host:port of process 0
    "PALM_JAX_NUM_PROCESSES",
    "PALM_JAX_PROCESS_ID",
)


def start(settings: config.Config) -> None:
    """Pin the thread pool, emulate devices if asked, and keep compiled programs.

    XLA:CPU splits contractions by the size of its thread pool, and so chooses their bits by
    it. NPROC sets that size, whatever the number of cores, when the devices are first used.
    """
    assert "palm_jax.step" not in sys.modules, "start() comes before anything that uses JAX"
    os.environ["NPROC"] = str(settings.numerics.threads)
    if settings.mesh.emulated_devices is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = re.sub(
            r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", "")
        )
        num_processes = int(os.environ.get(NUM_PROCESSES, "1"))
        here = settings.mesh.emulated_devices // num_processes
        count = f"--xla_force_host_platform_device_count={here}"
        os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
    # Warnings of XLA's loader about processor features it does not use.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    import jax

    if NUM_PROCESSES in os.environ:
        _join()
    # The size of the pool is not part of XLA's own key, so it is part of the folder.
    folder = cache_folder() / f"compiled-for-{settings.numerics.threads}-threads"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _join() -> None:
    """Meet the other processes.

    Raises:
      WrongInput: a variable is missing or no number.
    """
    import jax

    try:
        address = os.environ[COORDINATOR]
        count, index = int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS])
    except (KeyError, ValueError) as error:
        raise WrongInput(
            f"{NUM_PROCESSES} is set, so {COORDINATOR}=host:port and {PROCESS}=0.. must be: {error}"
        ) from None
    # Gloo prints to the process's standard output, which belongs to what was asked for.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jax.distributed.initialize(address, num_processes=count, process_id=index)


def cache_folder() -> pathlib.Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "palm_jax"
