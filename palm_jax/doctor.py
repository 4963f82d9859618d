"""Looks over a machine: can it train, where may it surprise, and how to mend that."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
from typing import Any, Literal

from packaging.requirements import Requirement

from palm_jax import config, probe, start
from palm_jax.corpus import manifest
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import memory as budget

GIB = 2**30

PYTHONS = ("3.11", "3.12", "3.13")  # those that tests run with
# Those whose versions decide about bits and files; the rest of constraints.txt carries them.
PACKAGES = (
    *("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorstore"),
    *("grain", "array_record", "numpy"),
)
OPTIONAL = ("libtpu",)
LITTLE_CACHE = GIB  # bytes; compiled programs of one large config take hundreds of MiB
MUCH_SKEW = 1.0  # seconds; the logbook's times are those of the first process

# For settings of the smallest run there is, where no config is given.
SMALLEST: dict[str, Any] = {
    "steps": 1,
    "model": {
        "num_layers": 1,
        "width": 8,
        "num_heads": 1,
        "head_size": 8,
        "vocabulary_size": 257,
        "sequence_length": 8,
    },
    "data": {"corpus": "", "ramp": {"sizes": [8]}},
}


@dataclasses.dataclass(frozen=True)
class Finding:
    check: str
    status: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""  # one sentence, for what is not ok


def examine(
    settings: config.Config | None, run: str | None = None, seconds: float = 120
) -> list[Finding]:
    """Look over this machine for a run of `settings` in the folder `run`.

    Args:
      settings: None: what no config is needed for.
      run: the run's folder; the default is the working directory. Nothing is left in it.
      seconds: how long to wait for devices, disks and the corpus, which are asked at once.
    """
    folder = run or "."
    plain = (config.from_dict(SMALLEST) if settings is None else settings).model_dump(mode="json")
    compiled = start.compiled_folder(config.from_dict(plain))
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "devices": ("devices", {"settings": plain, "with_mesh": settings is not None}),
        "compile cache": ("place", {"folder": str(compiled)}),
    }
    urls = {"disk": _url("disk", "--run", folder)}
    if urls["disk"] is None:
        asked["disk"] = ("place", {"folder": folder})
    if settings is not None:
        found = [_url("corpus", *place) for place in settings.data.places.items()]
        urls["corpus"] = next((finding for finding in found if finding is not None), None)
        if urls["corpus"] is None:
            asked["corpus"] = ("corpus", {"settings": plain})
    answers = _ask_all(asked, seconds)
    findings = [python(platform.python_version()), *packages(tested_versions())]
    findings += devices(answers["devices"], seconds, settings)
    if "disk" in answers:
        findings.append(disk(answers["disk"], settings))
    findings.append(cache(answers["compile cache"]))
    if settings is not None and "corpus" in answers:
        findings.append(corpus(answers["corpus"], settings))
    findings += [finding for finding in urls.values() if finding is not None]
    findings += [gcloud(), *variables(settings, os.environ), memory(settings, answers["devices"])]
    return findings


def _ask_all(
    asked: dict[str, tuple[str, dict[str, Any]]], seconds: float
) -> dict[str, probe.Answer | CannotDo]:
    """Answers to all questions, put at once."""

    def ask(question: str, given: dict[str, Any]) -> probe.Answer | CannotDo:
        try:
            return probe.ask(question, seconds, **given)
        except CannotDo as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(asked)) as threads:
        asking = {name: threads.submit(ask, *question) for name, question in asked.items()}
        return {name: answer.result() for name, answer in asking.items()}


def is_wrong(findings: list[Finding]) -> bool:
    return any(finding.status == "wrong" for finding in findings)


def _url(check: str, setting: str, folder: str) -> Finding | None:
    """A finding if `folder` is a URL."""
    try:
        manifest.local_folder(folder, setting)
    except WrongInput as error:
        remedy = (
            "A bucket can be mounted as a folder with gcsfuse; given that folder, this command "
            "says what is known of it"
        )
        return Finding(check, "wrong", str(error), remedy)
    return None


# --- the machine's programs ---


def python(version: str) -> Finding:
    if version.rpartition(".")[0] in PYTHONS:
        return Finding("python", "ok", version)
    return Finding(
        "python",
        "warning",
        f"{version}; tested with {', '.join(PYTHONS)}",
        "Use one of those, or run scripts/test with this one",
    )


def tested_versions() -> dict[str, str] | None:
    """Exact versions from the checkout's constraints.txt for this Python; None: no checkout."""
    path = pathlib.Path(__file__).resolve().parents[1] / "constraints.txt"
    if not path.is_file():
        return None
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            (version,) = requirement.specifier
            found[requirement.name] = version.version
    return found


def packages(tested: dict[str, str] | None) -> list[Finding]:
    """One finding for all packages that are as tested, and one for each that is not."""
    as_tested, others = [], []
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                remedy = "Install palm-jax with pip, which brings it"
                others.append(Finding(name, "wrong", "not installed", remedy))
            elif _looks_like_a_tpu():
                found = "not installed, though this machine seems to have TPUs"
                others.append(Finding(name, "warning", found, "pip install 'palm-jax[tpu]'"))
            else:
                as_tested.append(f"no {name} (only for TPUs and `palm-jax compile`)")
            continue
        if tested is None or tested.get(name) == version:
            as_tested.append(f"{name} {version}")
        else:
            found = f"{version}; tested with {tested.get(name, 'none')}"
            remedy = "pip install -c constraints.txt -e . in the checkout brings the tested one"
            others.append(Finding(name, "warning", found, remedy))
    unknown = "; no constraints.txt here says which were tested" if tested is None else ""
    return [Finding("packages", "ok", ", ".join(as_tested) + unknown), *others]


def _looks_like_a_tpu() -> bool:
    there = pathlib.Path("/dev")
    return any(there.glob("accel[0-9]*")) or any(there.glob("vfio/[0-9]*"))


def gcloud() -> Finding:
    where = shutil.which("gcloud")
    needed = "only scripts/tpu_vm needs it"
    return Finding("gcloud", "ok", where or f"not installed; {needed}")


# --- devices ---


def devices(
    answer: probe.Answer | CannotDo, seconds: float, settings: config.Config | None = None
) -> list[Finding]:
    """What starting the devices showed."""
    if isinstance(answer, CannotDo):
        return [
            Finding(
                "devices",
                "wrong",
                f"they did not start: {answer}",
                "See that no other process holds them, that XLA_FLAGS are this version's, and "
                "that every host of a slice runs this at the same time"
                + (f"; --timeout waits longer than {seconds:g} seconds" if seconds < 300 else ""),
            )
        ]
    several = answer["processes"] > 1
    here = f", {answer['local_count']} of them here" if several else ""
    of_each = "" if answer["memory"] is None else f" with {answer['memory'] / GIB:.1f} GiB each"
    found = (
        f"{answer['count']} x {answer['kind']} ({answer['platform']}){of_each}{here}; "
        f"{answer['processes']} process{'es' if several else ''}; "
        f"started in {answer['seconds']:.1f} s"
    )
    if answer["platform"] == "cpu" and _looks_like_a_tpu():
        remedy = "Install palm-jax[tpu], unset JAX_PLATFORMS, and end what else holds the TPU"
        findings = [
            Finding("devices", "warning", f"{found}; this machine seems to have TPUs", remedy)
        ]
    else:
        findings = [Finding("devices", "ok", found)]
    if settings is not None:
        from palm_jax import precision  # imports JAX, which a broken machine may not have

        policy = settings.precision.policy
        emulated = precision.is_emulated(policy, answer["platform"], answer["kind"])
        if emulated is not None:
            findings.append(
                Finding("format", "warning", emulated, "Expect the numbers, and not the speed")
            )
    if (mesh := answer["mesh"]) is not None:
        if mesh["problem"] is None:
            axes = " x ".join(f"{axis} {size}" for axis, size in mesh["shape"].items())
            findings.append(Finding("mesh", "ok", axes))
        else:
            remedy = "Set mesh.data, mesh.fsdp and mesh.tensor to the devices there are"
            findings.append(Finding("mesh", "wrong", mesh["problem"], remedy))
    if (clocks := answer["clocks"]) is not None:
        found = f"up to {clocks['spread']:.3f} s apart, give or take {clocks['uncertain']:.3f} s"
        if clocks["spread"] - clocks["uncertain"] > MUCH_SKEW:
            remedy = "Let NTP set them; bits do not depend on it, the times in logs do"
            findings.append(Finding("clocks", "warning", found, remedy))
        else:
            findings.append(Finding("clocks", "ok", found))
    return findings


# --- disks ---


def disk(answer: probe.Answer | CannotDo, settings: config.Config | None) -> Finding:
    """The disk of the run."""
    if isinstance(answer, CannotDo):
        remedy = "See whether the disk is mounted and its server answers, or choose another"
        return Finding("disk", "wrong", str(answer), remedy)
    found = f"{_gib(answer['free'])} free on {answer['mount'] or 'the disk'} ({answer['kind']})"
    if answer["problem"] is not None:
        remedy = "Choose a folder on a disk that can be written, locked and renamed on"
        if _is_bucket(answer["kind"]):
            remedy += "; of buckets, only those with a hierarchical namespace rename folders"
        return Finding("disk", "wrong", f"{answer['problem']}; {found}", remedy)
    if settings is not None:
        # Each checkpoint holds the train state; a new one is written before an old one goes.
        state = budget.state_bytes(settings)
        kept = settings.checkpoint.keep_last + settings.checkpoint.keep_best
        needed = f"a checkpoint takes {_gib(state)}, and {kept} are kept"
        found = f"{found}; {needed}"
        if answer["free"] < state:
            return Finding("disk", "wrong", found, "Make room, or choose another disk with --run")
        if answer["free"] < (kept + 1) * state:
            remedy = "Make room, or lower checkpoint.keep_last and checkpoint.keep_best"
            return Finding("disk", "warning", found, remedy)
    if _is_bucket(answer["kind"]):
        return Finding(
            "disk",
            "warning",
            f"{found}. It is mounted by a program (FUSE): gcsfuse renames folders as one only in "
            "buckets with a hierarchical namespace, locks hold on this machine alone, and an "
            "append may send the whole file",
            "Train on a local disk and copy the run, or let one machine alone write to it",
        )
    if answer["kind"] is not None and answer["kind"].startswith("nfs"):
        remedy = "See that only one job at a time is started on a run"
        return Finding("disk", "warning", f"{found}: locks may not hold between machines", remedy)
    return Finding("disk", "ok", found)


def _is_bucket(kind: str | None) -> bool:
    return kind is not None and kind.startswith("fuse")


def cache(answer: probe.Answer | CannotDo) -> Finding:
    """The folder of compiled programs; a run does not fail without it."""
    remedy = "Set XDG_CACHE_HOME to a folder that can be written; without it, every start compiles"
    if isinstance(answer, CannotDo):
        return Finding("compile cache", "warning", str(answer), remedy)
    found = f"{_gib(answer['free'])} free at {answer['folder']}"
    if answer["problem"] is not None:
        return Finding("compile cache", "warning", answer["problem"], remedy)
    if answer["free"] < LITTLE_CACHE:
        return Finding("compile cache", "warning", found, "Make room there, or set XDG_CACHE_HOME")
    return Finding("compile cache", "ok", found)


def corpus(answer: probe.Answer | CannotDo, settings: config.Config) -> Finding:
    if isinstance(answer, CannotDo):
        remedy = "Prepare it with `palm-jax data prepare`, or name another with data.corpus=..."
        return Finding("corpus", "wrong", str(answer), remedy)
    found = (
        f"{', '.join(settings.data.places.values())}: {answer['digest'][:16]}, "
        f"{answer['sequences']:,} sequences of "
        f"{settings.model.sequence_length} to train on"
    )
    return Finding("corpus", "ok", found)


# --- the processor's side ---


def variables(settings: config.Config | None, environ: Any) -> list[Finding]:
    """Variables that decide about bits."""
    threads = (config.Numerics() if settings is None else settings.numerics).threads
    found = f"numerics.threads={threads} on {_processors()} processors"
    given = environ.get("NPROC")
    if given in (None, str(threads)):
        findings = [Finding("threads", "ok", found)]
    else:
        remedy = f"Unset it; palm-jax sets NPROC={threads} itself"
        findings = [Finding("threads", "warning", f"{found}; NPROC={given} is ignored", remedy)]
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        if environ.get(name, "").strip():
            remedy = "Unset it unless it is meant; a run goes on only with what it began with"
            findings.append(Finding(name, "warning", environ[name].strip(), remedy))
        else:
            findings.append(Finding(name, "ok", "not set"))
    return findings


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(settings: config.Config | None, answer: probe.Answer | CannotDo) -> Finding:
    """This machine's memory, and that of its devices, against the train state."""
    total, available = host_memory()
    found = f"{_gib(available)} of {_gib(total)} available"
    if settings is None or isinstance(answer, CannotDo):
        return Finding("memory", "ok", found)
    state = budget.state_bytes(settings)
    if answer["platform"] == "cpu":
        room, where = total, "this machine"
    elif answer["memory"] is not None:
        # Replicas along mesh.data hold it once more.
        room, where = answer["memory"] * answer["count"] // settings.mesh.data, "the devices"
    else:
        return Finding("memory", "ok", found)
    found = f"{found}; a train state takes {_gib(state)} of the {_gib(room)} in {where}"
    remedy = "Use more devices along mesh.fsdp or mesh.tensor, or a smaller model"
    if state > room:
        return Finding("memory", "wrong", found, remedy)
    # Gradients are a third of it, activations and the checkpoint being written come on top.
    return (
        Finding("memory", "warning", found, remedy)
        if 2 * state > room
        else Finding("memory", "ok", found)
    )


def host_memory() -> tuple[int, int]:
    """Bytes in all, and available; less where a container may not have them all."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = available = os.sysconf("SC_PHYS_PAGES") * page
    described = pathlib.Path("/proc/meminfo")
    if described.exists():
        rows = dict(line.split(":") for line in described.read_text().splitlines())
        available = int(rows["MemAvailable"].split()[0]) * 1024
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((limit.parent / "memory.current").read_text())
        total = min(total, int(text))
        available = min(available, max(total - used, 0))
    return total, available


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"
