"""Questions whose answer may never come, put to a process that can be given up.

Starting devices may wait for other hosts, or for another process to let go of them; a folder
may lie on a server that no longer answers; a flag may make XLA abort.
"""

from __future__ import annotations

import collections.abc
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput

Answer = dict[str, Any]


def ask(question: str, seconds: float, **given: Any) -> Answer:
    """The answer of one of QUESTIONS, or CannotDo with the reason why there is none.

    Args:
      question: the name of a function of this module.
      seconds: how long to wait.
      given: its arguments, as JSON can hold them.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "palm_jax.probe", question],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that whatever it starts can be ended with it
    )
    try:
        said, complaints = process.communicate(json.dumps(given), timeout=seconds)
    except subprocess.TimeoutExpired:
        raise CannotDo(f"no answer within {seconds:g} seconds") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            # A process that waits for a dead disk cannot be killed; it is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
    if process.returncode != 0:
        raise CannotDo(_last_words(process.returncode, complaints))
    answer: Answer = json.loads(said.splitlines()[-1])
    if "refusal" in answer:
        raise CannotDo(answer["refusal"])
    return answer


def _last_words(code: int, complaints: str) -> str:
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    # Stack traces of C++ are indented, and begin with a star or an @.
    words = [line for line in complaints.splitlines() if line[:1] not in ("", " ", "*", "@", "\t")]
    last = words[-1] if words else "it said nothing"
    last = re.sub(r"^[A-Z][0-9]{4} [^\]]*\] ", "", last)  # severity, time and place of C++
    return f"{last[:300]} ({how})"


def devices(settings: dict[str, Any], with_mesh: bool) -> Answer:
    """What devices there are when `settings` start them, how long that takes, and how far the
    clocks of several processes differ."""
    from palm_jax import start

    began = time.perf_counter()
    wanted = config.from_dict(settings)
    start.start(wanted)

    import jax

    found = jax.devices()
    memory = found[0].memory_stats() if found[0].platform != "cpu" else None
    answer: Answer = {
        "seconds": time.perf_counter() - began,
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "count": len(found),
        "local_count": jax.local_device_count(),
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "memory": None if memory is None else memory.get("bytes_limit"),  # bytes, of one
        "mesh": None,
        "clocks": _clocks() if jax.process_count() > 1 else None,
    }
    if with_mesh:
        from palm_jax import sharding

        try:
            mesh = sharding.make_mesh(wanted.mesh)
            answer["mesh"] = {"shape": dict(mesh.shape), "problem": None}
        except (WrongInput, CannotDo) as error:
            answer["mesh"] = {"shape": None, "problem": str(error)}
    return answer


def _clocks() -> dict[str, float]:
    """Seconds between the first and the last clock of all processes, and how sure that is."""
    import numpy as np
    from jax.experimental import multihost_utils

    def gather(moment: float) -> Any:
        # As 32-bit words: JAX would halve 64-bit ones.
        words = np.array([int(moment), int(moment % 1 * 1e6)], np.uint32)
        gathered = np.asarray(multihost_utils.process_allgather(words)).astype(np.float64)
        return gathered[:, 0] + gathered[:, 1] / 1e6

    gather(0.0)  # compiles, and lets all come here
    began = time.perf_counter()
    gather(0.0)  # all leave within about the time that this takes
    uncertain = time.perf_counter() - began
    moments = gather(time.time())
    return {"spread": float(np.ptp(moments)), "uncertain": uncertain}


def place(folder: str) -> Answer:
    """What the disk under a folder can do, which need not exist."""
    there = pathlib.Path(folder).absolute()
    while not there.is_dir():
        there = there.parent
    mount, kind = file_system(there.resolve(), _mounts())
    problem = None
    for what, attempt in (
        ("written to", _write),
        ("locked", _lock),
        ("used: a folder cannot be renamed", _rename),
    ):
        try:
            with tempfile.TemporaryDirectory(prefix=".palm-jax-doctor-", dir=there) as scratch:
                attempt(pathlib.Path(scratch))
        except (OSError, CannotDo) as error:
            problem = f"{there} cannot be {what}: {error}"
            break
    return {
        "folder": str(there),
        "free": shutil.disk_usage(there).free,
        "mount": mount,
        "kind": kind,
        "problem": problem,
    }


def _write(scratch: pathlib.Path) -> None:
    with (scratch / "file").open("w") as file:
        file.write("text")
        file.flush()
        os.fsync(file.fileno())


def _lock(scratch: pathlib.Path) -> None:
    """As a run is held, so that a second process is refused."""
    from palm_jax.record import lock

    with lock.held(scratch):
        try:
            with lock.held(scratch):
                pass
        except CannotDo:
            return
    raise CannotDo("a second lock on it is granted as well")


def _rename(scratch: pathlib.Path) -> None:
    """As a run, a segment and a checkpoint come into being."""
    (scratch / "new" / "inner").mkdir(parents=True)
    (scratch / "new" / "inner" / "file").write_text("text")
    (scratch / "new").rename(scratch / "whole")
    if (scratch / "whole" / "inner" / "file").read_text() != "text":
        raise CannotDo("a file in it is another one afterwards")


def _mounts() -> list[tuple[str, str]]:
    """Mount points and their kinds of file system, where the kernel tells (Linux)."""
    try:
        text = pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text.splitlines()]
    # The kernel writes \040 for a space.
    return [(row[1].encode().decode("unicode_escape"), row[2]) for row in rows]


def file_system(
    folder: pathlib.Path, mounts: collections.abc.Sequence[tuple[str, str]]
) -> tuple[str | None, str | None]:
    """The mount point that `folder` is under, and its kind of file system."""
    # Of two mounts on one place the later one is seen.
    holding = [(len(point), n) for n, (point, _) in enumerate(mounts) if _is_under(folder, point)]
    return mounts[max(holding)[1]] if holding else (None, None)


def _is_under(folder: pathlib.Path, point: str) -> bool:
    return folder == pathlib.Path(point) or pathlib.Path(point) in folder.parents


def corpus(settings: dict[str, Any]) -> Answer:
    """Whether the corpora of a config open, and fit the model."""
    from palm_jax import train
    from palm_jax.corpus.corpora import open_corpus

    wanted = config.from_dict(settings)
    with open_corpus(wanted.data) as opened:
        train.check_corpus(wanted, opened.manifest)
        return {"digest": opened.manifest.digest, "sequences": opened.num_sequences("train")}


QUESTIONS: dict[str, collections.abc.Callable[..., Answer]] = {
    "devices": devices,
    "place": place,
    "corpus": corpus,
}


def main() -> None:
    """Read a question's arguments from stdin and write the answer to stdout, both as JSON."""
    try:
        answer = QUESTIONS[sys.argv[1]](**json.load(sys.stdin))
    except (WrongInput, CannotDo) as error:
        answer = {"refusal": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
