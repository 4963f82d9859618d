"""What must be set before JAX first looks at its devices, from the config.

Nothing here may import JAX at the top: the caller imports the rest of the package afterwards.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

from palm_jax import config, meeting
from palm_jax.errors import WrongInput
from palm_jax.tpu import topologies

_EMULATED = "--xla_force_host_platform_device_count"


def start(settings: config.Config) -> None:
    """Pin the thread pool, emulate devices if asked, meet other processes, and, where it is
    safe, keep what is compiled.

    XLA:CPU splits contractions by the size of its thread pool, and so chooses their bits by
    it. NPROC sets that size, whatever the number of cores, when the devices are first used. SciPy's
    LAPACK, which it calls for decompositions, does likewise, and has one thread.

    Raises:
      WrongInput: a variable that describes several processes is missing or wrong.
      CannotDo: the other processes cannot be met.
    """
    assert "palm_jax.step" not in sys.modules, "start() comes before anything that uses JAX"
    several = meeting.announced()
    os.environ["NPROC"] = str(settings.numerics.threads)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
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
        meeting.meet(*several, settings.distributed)
    elif "tpu" in platforms:
        meeting.meet_tpu_hosts(settings.distributed)
    elif meeting.COORDINATOR in os.environ:
        raise meeting.incomplete(f"{meeting.COORDINATOR} is set", meeting.NUM_PROCESSES)
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
            f"mesh.emulated_devices={num_devices} does not divide by {meeting.NUM_PROCESSES}="
            f"{num_processes}; each process emulates an equal part"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    others = re.sub(rf"{_EMULATED}=\S+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{others} {_EMULATED}={num_devices // num_processes}".strip()
