"""Checkpoints of the train state: saved in the background, kept by policy, restored bit for bit.

Checkpoint STEP is the state whose next step is STEP. It lies in FOLDER/STEP, written by Orbax
under a temporary name and renamed when complete, with two items:

  state/   the arrays, as nested dicts along the leaves' paths
  record/  JSON: the caller's record; the held-out loss; dtype, shape and digest of each leaf;
           and a checksum of all that

Orbax returns a flipped bit, another dtype and an empty newest folder without a word. A restore
here trusts nothing but the record: it checks paths, shapes and dtypes against it before
reading arrays, and the digest of what was read afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import pathlib
import re
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import digests, inventory


class _KeepBest:
    """Preservation policy: the `num` checkpoints with the lowest held-out loss, newer first.

    Not Orbax's BestN: that keeps any checkpoint, measured or not, while there are few, ranks
    NaN by accident, and reads metrics that no checksum covers.
    """

    def __init__(self, num: int, losses: Mapping[int, float | None]) -> None:
        self.num, self.losses = num, losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each of Orbax's `checkpoints`."""
        known = [(self.losses.get(c.step), -c.step) for c in checkpoints]
        ranked = sorted((loss, step) for loss, step in known if loss is not None)
        best = {-step for _, step in ranked[: self.num]}
        return [c.step in best for c in checkpoints]


class _KeepPinned:
    """Keeps the checkpoints that somebody needs, as long as they do."""

    def __init__(self, pinned: set[int]) -> None:
        self.pinned = pinned

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each of Orbax's `checkpoints`."""
        return [c.step in self.pinned for c in checkpoints]


class Checkpoints:
    """The checkpoints in one folder.

    Reading creates and removes nothing. With several processes, all of them call `save`,
    `restore`, `wait` and `close` together.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: config.Checkpoint) -> None:
        """Open a folder, which need not exist yet; gs:// paths must be given as text.

        Raises:
          WrongInput: a URL that went through pathlib, which makes `gs:/` of `gs://`.
        """
        if re.match(r"[a-z0-9]{2,}:/[^/]", os.fspath(folder)):
            raise WrongInput(f"{os.fspath(folder)} is a URL that lost a slash; give it as text")
        path = epath.Path(folder)
        # Orbax refuses relative paths; and a later chdir must not move the folder.
        is_url = "://" in os.fspath(path)
        self.folder = path if is_url else epath.Path(pathlib.Path(folder).absolute())
        self._losses: dict[int, float | None] = {}
        self.pinned: set[int] = set()  # steps that are kept whatever the settings say
        self._saving: int | None = None  # the step of a background save
        self._while_saving = contextlib.ExitStack()
        self._is_clean = False  # no leftovers of other processes, and Orbax knows the steps
        policies: list[Any] = [
            checkpoint_managers.LatestN(settings.keep_last),
            _KeepBest(settings.keep_best, self._losses),
            _KeepPinned(self.pinned),
        ]
        if settings.keep_every is not None:
            policies.append(checkpoint_managers.EveryNSteps(settings.keep_every))
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                todelete_subdir=inventory.REMOVED,
                lightweight_initialize=True,  # reads nothing that could be damaged
            ),
        )

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint on the disk, ascending."""
        return inventory.steps(self.folder)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def leftovers(self) -> list[str]:
        """Names in the folder left by a save that never ended; the next `save` removes them."""
        found = inventory.leftovers(self.folder)
        if self._saving is None:
            return found
        ours = (f"{self._saving}{inventory.TEMPORARY}", inventory.REMOVED)
        return [name for name in found if name not in ours]

    def save(
        self, step: int, state: Any, record: Mapping[str, Any], held_out_loss: float | None
    ) -> digests.Digest:
        """Start saving `state` in the background; returns its digest when it may be donated.

        Args:
          step: the state's next step; must be above every step in the folder.
          state: pytree of arrays, none of them empty.
          record: plain JSON, without NaN or infinity.
          held_out_loss: nats; None, or not finite: never among the best.
        Raises:
          CannotDo: a step not above the newest, or a disk that does not take the checkpoint;
            also when the previous save failed in the background.
        """
        self.wait()
        if not self._is_clean:
            self._clean()
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            # Orbax would silently save nothing.
            raise CannotDo(
                f"cannot save step {step} in {self.folder}, which already has step {newest}: "
                "steps before the newest belong into a new segment"
            )
        leaves = digests.named_leaves(state)
        if empty := [path for path, leaf in leaves.items() if not leaf.size]:
            raise CannotDo(f"a checkpoint cannot hold an array without elements: {empty[0]}")
        digest = digests.digest(state)
        is_known = held_out_loss is not None and math.isfinite(held_out_loss)
        loss = held_out_loss if is_known else None
        stored = {
            # As JSON gives it back: text for keys and lists for tuples.
            "record": json.loads(json.dumps(record, allow_nan=False)),
            "step": step,
            "held_out_loss": loss,
            "leaves": {path: digests.describe(leaf) for path, leaf in leaves.items()},
            "digest": {"whole": digest.whole, "leaves": digest.leaves},
        }
        assert not record.keys() & stored.keys(), f"taken by save itself: {sorted(stored)}"
        stored["checksum"] = inventory.checksum(stored)
        arrays = _nested({path: _detached(leaf) for path, leaf in leaves.items()})
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(stored)
        )
        self._saving, self._losses[step] = step, loss
        self._while_saving.enter_context(_no_abandoned_files())
        try:
            saved = self._manager.save(step, args=items)
        except Exception as error:
            self._forget_failed_save()
            raise CannotDo(
                f"saving the checkpoint of step {step} in {self.folder} failed: {_brief(error)}"
            ) from error
        assert saved, f"Orbax saved nothing for step {step} in {self.folder}"
        return digest

    def wait(self) -> None:
        """Wait until the background save is complete on the disk.

        Raises:
          CannotDo: it failed; the folder holds what it held before.
        """
        step = self._saving
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._forget_failed_save()
            raise CannotDo(
                f"saving the checkpoint of step {step} in {self.folder} failed: {_brief(error)}"
            ) from error
        finally:
            self._while_saving.close()
        if step is not None:
            self._saving = None
            self._empty_removed()

    def close(self) -> None:
        """Wait, and stop Orbax's threads. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def record(self, step: int) -> dict[str, Any]:
        """What `save` was given and found out: the record with `step`, `held_out_loss`,
        `leaves` ({path: "float32[8,16]"}) and `digest` ({"whole", "leaves": {path: hex}}).

        Raises:
          WrongInput: there is no such step.
          CannotDo: the record on the disk is damaged.
        """
        return _public(self._stored(step))

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint, bit for bit, onto any mesh.

        Args:
          step: one of `steps()`.
          like: pytree of ShapeDtypeStruct (or arrays), each with the sharding to restore to.
        Returns:
          the state, a tree as `like`, and its record as `record` gives it.
        Raises:
          WrongInput: there is no such step; or `like` has other leaves, shapes or dtypes.
          CannotDo: the checkpoint is damaged.
        """
        self.wait()
        stored = self._stored(step)
        targets = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in digests.named_leaves(like).items()
        }
        for path, target in targets.items():
            assert target.sharding is not None, f"restore needs a sharding for leaf {path}"
        self._check_leaves(step, stored["leaves"], targets)
        restored = self._read_arrays(step, targets)
        recorded = digests.Digest(stored["digest"]["leaves"], stored["digest"]["whole"])
        found = digests.digest(restored)
        if wrong := recorded.differing(found):
            names = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if wrong[5:] else "")
            raise CannotDo(self._damaged(step, f"other bits than were saved in {names}"))
        if recorded.whole != found.whole:
            raise CannotDo(self._damaged(step, "another digest of the whole than was saved"))
        state = jax.tree.unflatten(jax.tree.structure(like), [restored[p] for p in targets])
        return state, _public(stored)

    def verify(
        self, step: int, tell: Callable[[int, int], None] = lambda done, total: None
    ) -> list[str]:
        """Read a checkpoint completely, and compare it with its record.

        On one CPU device and leaf by leaf: it needs neither the model nor a mesh, and memory for
        the largest leaf only.

        Args:
          step: one of `steps()`.
          tell: is told how many bytes were read, of how many, before and after each leaf.
        Returns:
          what is damaged, by leaf; nothing if the checkpoint is sound.
        Raises:
          CannotDo: it cannot be read here, which says nothing about the checkpoint.
        """
        self.wait()
        try:
            stored = inventory.stored(self.folder, step)
        except (OSError, ValueError) as error:
            self._refuse_if_not_damage(step, error)
            return [f"its record is unreadable ({error})"]
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        targets = {path: digests.described(x, sharding) for path, x in stored["leaves"].items()}
        found: dict[str, str] = {}
        problems, done, total = [], 0, bytes_of(targets)
        tell(done, total)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader, _no_abandoned_files():
            for path, target in targets.items():
                try:
                    leaf = self._read_leaf(reader, step, targets, path)
                    found[path] = digests.digest(leaf).leaves[""]
                except Exception as error:
                    self._refuse_if_not_damage(step, error)
                    problems.append(f"{path} cannot be read ({_brief(error)})")
                else:
                    if found[path] != stored["digest"]["leaves"][path]:
                        problems.append(f"{path} has other bits than were saved")
                done += bytes_of(target)
                tell(done, total)
        if not problems and digests.joined(found, targets).whole != stored["digest"]["whole"]:
            problems.append("another digest of the whole than was saved")
        return problems

    def read(self, step: int, below: str) -> Iterator[tuple[str, np.ndarray]]:
        """The leaves whose paths begin with `below`, by their paths without it, on one CPU device.

        One at a time, each with the bits that were saved; needs neither the model nor a mesh.

        Raises:
          WrongInput: there is no such step, or no such leaf.
          CannotDo: the checkpoint is damaged, or cannot be read here.
        """
        self.wait()
        stored = self._stored(step)
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        targets = {path: digests.described(x, sharding) for path, x in stored["leaves"].items()}
        wanted = [path for path in targets if path.startswith(below)]
        if not wanted:
            raise WrongInput(f"checkpoint {step} in {self.folder} has no leaf {below}...")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader, _no_abandoned_files():
            for path in wanted:
                try:
                    leaf = self._read_leaf(reader, step, targets, path)
                except Exception as error:
                    self._refuse_if_not_damage(step, error)
                    problem = f"{path} cannot be read ({_brief(error)})"
                    raise CannotDo(self._damaged(step, problem)) from error
                if digests.digest(leaf).leaves[""] != stored["digest"]["leaves"][path]:
                    raise CannotDo(self._damaged(step, f"other bits than were saved in {path}"))
                yield path.removeprefix(below), np.asarray(leaf)

    def _read_leaf(
        self, reader: Any, step: int, targets: dict[str, jax.ShapeDtypeStruct], path: str
    ) -> jax.Array:
        """One array. Fails also where the checkpoint has leaves that are not among `targets`."""
        target = targets[path]
        items: dict[str, Any] = {**dict.fromkeys(targets, ocp.PLACEHOLDER), path: target}
        how = ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
        )
        hows = {**dict.fromkeys(targets, ocp.RestoreArgs()), path: how}
        arguments = ocp.args.PyTreeRestore(item=_nested(items), restore_args=_nested(hows))
        read = reader.restore(self.folder / str(step) / "state", args=arguments)
        return digests.named_leaves(read)[path]

    def _refuse_if_not_damage(self, step: int, error: Exception) -> None:
        """Raise CannotDo for what says more of the machine than of the checkpoint."""
        if any(map(_is_of_the_machine, _causes(error))):
            raise CannotDo(
                f"checkpoint {step} in {self.folder} cannot be read here: {_brief(error)}"
            ) from error

    def _read_arrays(self, step: int, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_nested(targets)))
        try:
            with _no_abandoned_files():
                return digests.named_leaves(self._manager.restore(step, args=items)["state"])
        except Exception as error:
            problem = f"its arrays cannot be read ({_brief(error)})"
            raise CannotDo(self._damaged(step, problem)) from error

    def _check_leaves(self, step: int, saved: dict[str, str], targets: dict[str, Any]) -> None:
        def refuse(problem: str) -> WrongInput:
            return WrongInput(
                f"checkpoint {step} in {self.folder} {problem}; restore it with the model and "
                "optimizer settings that it was saved with"
            )

        if missing := [path for path in targets if path not in saved]:
            raise refuse(f"has no leaf {', '.join(missing[:5])}")
        if extra := [path for path in saved if path not in targets]:
            raise refuse(f"has a leaf {', '.join(extra[:5])} that this state does not have")
        for path, target in targets.items():
            if (wanted := digests.describe(target)) != saved[path]:
                raise refuse(f"holds {path} as {saved[path]}, but this state has it as {wanted}")

    def _stored(self, step: int) -> dict[str, Any]:
        there = self.steps()
        if step not in there:
            listed = ", ".join(map(str, there)) if there else "none"
            raise WrongInput(f"there is no checkpoint {step} in {self.folder}; there are: {listed}")
        try:
            return inventory.stored(self.folder, step)
        except (OSError, ValueError) as error:
            raise CannotDo(self._damaged(step, f"its record is unreadable ({error})")) from error

    def _damaged(self, step: int, problem: str) -> str:
        usable = None
        for older in reversed([s for s in self.steps() if s < step]):
            try:
                inventory.stored(self.folder, older)
            except (OSError, ValueError):
                continue  # damaged as well; look further back
            usable = older
            break
        remedy = "there is no older one" if usable is None else f"use step {usable} instead"
        return f"checkpoint {step} in {self.folder} is damaged: {problem}; {remedy}"

    def _clean(self) -> None:
        """Create the folder, remove leftovers, and tell Orbax which steps there are."""
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                inventory.remove(self.folder, self.leftovers())
            self._empty_removed()
        except OSError as error:
            raise CannotDo(f"cannot prepare {self.folder} for checkpoints: {error}") from error
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("palm_jax: checkpoint folder is clean")
        self._manager.reload()
        self._losses.clear()
        for step in self.steps():
            try:
                self._losses[step] = inventory.stored(self.folder, step)["held_out_loss"]
            except (OSError, ValueError):
                self._losses[step] = None  # damaged: `restore` says so, and it is never best
        self._is_clean = True

    def _empty_removed(self) -> None:
        removed = self.folder / inventory.REMOVED
        if jax.process_index() == 0 and removed.exists():
            removed.rmtree()

    def _forget_failed_save(self) -> None:
        self._saving, self._is_clean = None, False


def bytes_of(state_like: Any) -> int:
    """Bytes of a tree of arrays or ShapeDtypeStructs, uncompressed, over all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state_like))


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Free space of the disk that `folder`, which need not exist, is or would be on."""
    place = pathlib.Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_space(folder: str | os.PathLike[str], bytes_needed: int) -> None:
    """Refuse a disk with less free space than one checkpoint needs.

    The folder need not exist. Buckets (gs://) have no end and are not asked.

    Raises:
      CannotDo: the free space is smaller than `bytes_needed`.
    """
    if "://" in os.fspath(folder):
        return
    if (free := free_bytes(folder)) < bytes_needed:
        raise CannotDo(
            f"a checkpoint needs {bytes_needed / 2**30:.3g} GiB, but {os.fspath(folder)} has "
            f"{free / 2**30:.3g} GiB free: free some, or choose another folder for the run"
        )


class _PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that ends all its tasks before it closes."""

    def close(self) -> None:
        while not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def _no_abandoned_files() -> Iterator[None]:
    """Let Orbax finish its other reads and writes when one fails.

    It closes the event loop under them, and each of them then protests on stderr, some from
    TensorStore's threads and much later. Orbax takes no event loop from its caller.
    """
    usual = asyncio.new_event_loop
    asyncio.new_event_loop = _PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = usual


# What TensorStore and JAX say when memory, a disk or a permission is wanting.
_NOT_DAMAGE = re.compile(
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|CANCELLED"
)
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}  # of the errors of a file system


def _is_of_the_machine(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _DAMAGES
    return _NOT_DAMAGE.search(str(error)) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what led to it, the first cause last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _brief(error: BaseException) -> str:
    """The first cause, in one line: Orbax and TensorStore write pages."""
    *_, error = _causes(error)
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= 300 else line[:300] + "..."


def _public(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored["record"], **{key: x for key, x in stored.items() if key != "record"}}


def _detached(leaf: jax.Array) -> jax.Array:
    """An array whose buffers nobody else will donate.

    On accelerators Orbax has fetched all data before its save returns. On CPU it fetches
    nothing: it writes from views of the very buffers that the next step overwrites.
    """
    devices: Any = leaf.sharding.device_set
    on_cpu = all(device.platform == "cpu" for device in devices)
    return leaf.copy() if on_cpu else leaf


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}; plain dicts, so that reading needs none of our classes."""
    nested: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        assert name not in place, f"two leaves lie at {path}"
        place[name] = leaf
    return nested
