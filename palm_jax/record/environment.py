"""All that can change the bits of a step, taken from the machine that runs it.

A capture is flat and JSON-able: one field, one value. It holds no names of people or
machines and no absolute paths, so that it can be published with a run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
from typing import Any

import jax

from palm_jax import config, precision
from palm_jax.errors import WrongInput

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "scipy",
)

# Recorded to be read, never compared. Python, NumPy and Orbax carry bits without computing
# any. What this package's own code makes of a config is compared where it counts: the module
# that XLA is given for each batch size, and the digest of the batches.
INFORMATIONAL = frozenset(
    {
        "python",
        "numpy",
        "orbax-checkpoint",
        "palm_jax",
        "commit",
        "dirty",
        "source",
        "chips",
    }
)

# Canonical sums follow one tree whatever the data-parallel width (docs/bits.md), so these
# cannot change their bits.
ONLY_IF_FAST = frozenset({"device_count", "process_count", "mesh.data", "mesh.fsdp"})

# Fields that count only on one platform: XLA:CPU generates code for the processor it runs on
# and splits contractions by the size of its thread pool, as SciPy's LAPACK does, which decomposes
# matrices for it; a host's processor does no arithmetic of a step on a TPU.
ONLY_ON = {
    "cpu": frozenset(
        {"threads", "NPROC", "OPENBLAS_NUM_THREADS", "scipy", "machine", "cpu_model", "cpu_flags"}
    ),
    "tpu": frozenset({"libtpu", "LIBTPU_INIT_ARGS", "MEGASCALE"}),
}


def capture(*, numerics: config.Numerics, mesh_shape: dict[str, int]) -> dict[str, Any]:
    """The environment of this process. Starts JAX's devices if nothing has yet.

    Args:
      numerics: what the run asks for; of the size of the thread pool, `NPROC` is what the
        process has.
      mesh_shape: devices along each mesh axis.
    Raises:
      WrongInput: XLA_FLAGS names a file of flags that cannot be read.
    """
    device = jax.devices()[0]
    model, flags = _processor()
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "palm_jax": _version("palm_jax"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        **{f"mesh.{axis}": size for axis, size in mesh_shape.items()},
        "XLA_FLAGS": normalised_flags("XLA_FLAGS"),
        "LIBTPU_INIT_ARGS": normalised_flags("LIBTPU_INIT_ARGS"),
        "MEGASCALE": sorted(
            f"{name}={value}"
            for name, value in os.environ.items()
            if name.startswith("MEGASCALE_") and "ADDRESS" not in name
        ),
        "compiler_options": sorted(
            f"{name}={value}"
            for name, value in precision.compiler_options(
                device.platform, numerics.reduction
            ).items()
        ),
        "chips": _chips(),
        "reduction": numerics.reduction,
        "threads": numerics.threads,
        "NPROC": os.environ.get("NPROC"),
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS"),
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "prng": jax.config.jax_default_prng_impl,  # type: ignore[attr-defined]
        "threefry_partitionable": jax.config.jax_threefry_partitionable,  # type: ignore[attr-defined]
        "machine": platform.machine(),
        "cpu_model": model,
        "cpu_flags": flags,
        "source": _own_source(),
        **_checkout(),
    }


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that can change bits and differ: {"jax": ("0.10.2", "0.12.0")}.

    A field that only one capture has counts as different, with None for the other.
    """
    platforms = recorded.get("platform"), current.get("platform")
    ignored = set(INFORMATIONAL)
    if "fast" not in (recorded.get("reduction"), current.get("reduction")):
        ignored |= ONLY_IF_FAST
    for name, fields in ONLY_ON.items():
        if name not in platforms:
            ignored |= fields
    return {
        field: (recorded.get(field), current.get(field))
        for field in recorded | current
        if field not in ignored and recorded.get(field) != current.get(field)
    }


def normalised_flags(variable: str) -> list[str]:
    """Flags of an environment variable such as XLA_FLAGS, sorted, the last of each name.

    Left out are the number of emulated devices (recorded by itself) and where and what
    to dump. An absolute path is replaced by `<path>`.

    Raises:
      WrongInput: the variable names a file of flags that cannot be read.
    """
    text = os.environ.get(variable, "").strip()
    if text and not text.startswith("-"):
        # XLA then reads the flags from the file of that name.
        try:
            text = pathlib.Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WrongInput(
                f"{variable}={text} is neither a flag nor a readable file of flags: {error}"
            ) from None
    flags: dict[str, str] = {}
    for flag in shlex.split(text):
        name, equals, value = flag.partition("=")
        name = name.lstrip("-")
        if name == "xla_force_host_platform_device_count" or name.startswith("xla_dump_"):
            continue
        flags[name] = f"--{name}{equals}{'<path>' if value.startswith(('/', '~')) else value}"
    return [flags[name] for name in sorted(flags)]


def code_identity() -> dict[str, str | None]:
    """Versions and a digest of this package's source, which all processes of a run share."""
    return {**{name: _version(name) for name in PACKAGES}, "palm_jax's source": _own_source()}


@functools.cache
def _own_source() -> str:
    """Of the code as it was loaded, whatever happens to the files afterwards."""
    return source_digest(_package_folder())


def source_digest(package: pathlib.Path) -> str:
    """Hash over a package's .py files: relative path and bytes of each."""
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()):
        name = path.relative_to(package).as_posix().encode()
        for part in (name, path.read_bytes()):
            whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:16]


def _package_folder() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parent.parent


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chips() -> list[list[Any]] | None:
    """For each device of an accelerator: process, slice and place in the topology."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return None
    return [
        [d.process_index, getattr(d, "slice_index", None), list(getattr(d, "coords", ()))]
        for d in devices
    ]


def _processor() -> tuple[str | None, str | None]:
    """Model name, and a hash of the feature flags, where the kernel tells (Linux)."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, None  # not Linux; `machine` is all there is
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features"))  # x86, Arm
    digest = None if flags is None else hashlib.sha256(" ".join(sorted(flags.split())).encode())
    return fields.get("model name"), None if digest is None else digest.hexdigest()[:16]


def _checkout() -> dict[str, Any]:
    """Commit of the git checkout that holds the package, and whether it was changed since.

    Both are None where git, a checkout or a commit is missing, and where the package lies
    in a repository that does not track it, such as a virtual environment inside one.
    """
    folder = _package_folder()
    # Set while git runs a hook, they would point git at another repository.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environ["GIT_OPTIONAL_LOCKS"] = "0"

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", "errors.py")
    commit = git("rev-parse", "HEAD") if tracked else None
    changes = git("status", "--porcelain", "--", ".") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}
