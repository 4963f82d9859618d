"""What must be set before JAX first looks at its devices, from the config.

Nothing here may import JAX at the top: the caller imports the rest of the package afterwards.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

from palm_jax import config


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
        count = f"--xla_force_host_platform_device_count={settings.mesh.emulated_devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
    # Warnings of XLA's loader about processor features it does not use.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    import jax

    # The size of the pool is not part of XLA's own key, so it is part of the folder.
    folder = cache_folder() / f"compiled-for-{settings.numerics.threads}-threads"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cache_folder() -> pathlib.Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "palm_jax"
