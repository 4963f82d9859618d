"""Each case in a process of its own, because JAX looks at its devices once."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

from palm_jax import config, errors, meeting, start
from palm_jax.tpu import topologies

SET_BY_CONFTEST = ("JAX_PLATFORMS", "NPROC", "OPENBLAS_NUM_THREADS", "XLA_FLAGS")
SETTINGS = {
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
HEAD = f"""
import os, signal, sys
from palm_jax import config, start
settings = config.override(config.from_dict({SETTINGS}), sys.argv[1:])
"""
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def execute(script: str, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Execute a script with `settings`; a wrong input or environment ends it as its last line."""
    unset = {*SET_BY_CONFTEST, meeting.COORDINATOR, meeting.NUM_PROCESSES, meeting.PROCESS}
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script), *overrides],
        env={
            **{k: v for k, v in os.environ.items() if k not in unset | set(topologies.NO_TPU)},
            "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output_of(script: str, *overrides: str, **environ: str) -> list[str]:
    done = execute(script, *overrides, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


KEPT = """
    start.start(settings)
    import jax
    print(jax.config.jax_compilation_cache_dir is not None)
"""


@pytest.mark.parametrize(
    ("kept", "overrides", "environ"),
    [
        ("True", (), {}),
        ("True", ("mesh.emulated_devices=1",), {}),
        ("False", ("mesh.emulated_devices=2", "mesh.data=2"), {}),
        ("False", (), {"XLA_FLAGS": f"{start._EMULATED}=8"}),
        ("False", (), {"XLA_FLAGS": f"{start._EMULATED}=8", "JAX_PLATFORMS": "cpu"}),
        ("True", (), {"XLA_FLAGS": f"{start._EMULATED}=8", "JAX_PLATFORMS": "cuda"}),
    ],
)
def test_programs_of_several_cpu_devices_are_compiled_each_time(kept, overrides, environ):
    assert output_of(KEPT, *overrides, **environ) == [kept]


def test_modules_do_not_depend_on_where_their_sources_lie():
    # The body of a kernel is in its module as encoded bytes, and with it the names of files.
    lines = output_of("""
        start.start(settings)
        import jax
        SOURCE = '''
        import jax, jax.numpy as jnp
        from jax.experimental import pallas
        SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        def kernel(x, y):
            y[...] = 2 * x[...]
        def double(x):
            return pallas.pallas_call(kernel, out_shape=SHAPE)(x)
        '''
        import textwrap
        for place in ("/here/kernels.py", "/somewhere/else/kernels.py"):
            names = {}
            exec(compile(textwrap.dedent(SOURCE), place, "exec"), names)
            lowered = jax.jit(names["double"]).trace(names["SHAPE"])
            print(hash(lowered.lower(lowering_platforms=("tpu",)).as_text()))
    """)
    assert len(lines) == 2
    assert lines[0] == lines[1]


def test_decompositions_have_one_thread_whatever_the_user_asks_for():
    lines = output_of(
        """
        start.start(settings)
        import ctypes, scipy.linalg
        path = next(x.split()[-1] for x in open("/proc/self/maps") if "libscipy_openblas-" in x)
        print(ctypes.CDLL(path).scipy_openblas_get_num_threads())
        """,
        JAX_PLATFORMS="cpu",
        OPENBLAS_NUM_THREADS="2",
    )
    assert lines == ["1"]


def test_process_for_a_cpu_is_told_nothing_of_tpus():
    lines = output_of(
        """
        import jax, jax.numpy as jnp
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        product = lambda x: x @ x
        before = jax.jit(product).lower(x).as_text()
        start.start(settings)
        print(before == jax.jit(product).lower(x).as_text(), os.environ["NPROC"], jax.devices())
        print([name for name in ("TPU_LOG_DIR", "TPU_ACCELERATOR_TYPE") if name in os.environ])
        """,
        JAX_PLATFORMS="cpu",
    )
    assert lines == ["True 8 [CpuDevice(id=0)]", "[]"]


@needs_libtpu
def test_libtpu_is_silent_and_leaves_no_lock_where_there_is_no_tpu():
    done = execute(
        """
        start.start(settings)
        import jax
        print(jax.devices()[0].platform, os.path.exists("/tmp/libtpu_lockfile"))
        print(os.environ["TPU_LOG_DIR"], os.environ["TPU_ACCELERATOR_TYPE"])
        """,
        JAX_PLATFORMS="",
        TPU_ACCELERATOR_TYPE="v5p-8",  # whoever says so knows
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "cpu False\ndisabled v5p-8\n"


# Stands in for the meeting, and says what was set before it.
FAKE = """
import jax
def initialize(**arguments):
    print("meets", arguments, jax.config.jax_enable_preemption_service, flush=True)
    os.write(1, b"from C\\n")
jax.distributed.initialize = initialize
"""


def test_hosts_of_a_tpu_slice_meet_before_anything_else():
    done = execute(
        FAKE + "start.start(settings); print(jax.config.jax_default_matmul_precision)",
        JAX_PLATFORMS="tpu,cpu",
    )
    assert done.returncode == 0, done.stderr
    # What C++ prints on the way does not reach stdout.
    waits = (
        "{'initialization_timeout': 330, 'heartbeat_timeout_seconds': 100, "
        "'shutdown_timeout_seconds': 100}"
    )
    assert done.stdout.splitlines() == [f"meets {waits} False", "highest"]
    assert done.stderr == "from C\n"


@pytest.mark.parametrize(
    ("policy", "platform", "expected"),
    [
        ("float32", "tpu", "highest"),
        ("bfloat16", "tpu", None),
        ("float32", "cpu", None),
        ("float32", "", None),
    ],
)
def test_float32_is_multiplied_in_full_on_a_tpu(policy, platform, expected):
    assert start.matmul_precision(config.Precision(policy=policy), platform) == expected


def test_processes_that_are_announced_meet_where_they_say():
    done = execute(
        FAKE + "start.start(settings); print('done', os.environ['XLA_FLAGS'])",
        "mesh.emulated_devices=8",
        "mesh.fsdp=8",
        JAX_COORDINATOR_ADDRESS="10.0.0.2:8476",
        PALM_JAX_NUM_PROCESSES="2",
        PALM_JAX_PROCESS_ID="1",
    )
    meets, then = done.stdout.splitlines()
    assert meets == (
        "meets {'initialization_timeout': 330, 'heartbeat_timeout_seconds': 100, "
        "'shutdown_timeout_seconds': 100, 'coordinator_address': '10.0.0.2:8476', "
        "'num_processes': 2, 'process_id': 1, 'cluster_detection_method': 'deactivate'} False"
    )
    assert then == "done --xla_force_host_platform_device_count=4"
    assert done.stderr == "from C\n"


def test_meeting_leaves_sigterm_to_the_run():
    # A bit for each signal that the process catches, whoever installed the handler.
    (line,) = output_of(
        """
        start.start(settings)
        import jax
        print(jax.process_count(), jax.distributed.is_initialized())
        (caught,) = [x for x in open("/proc/self/status") if x.startswith("SigCgt")]
        assert not int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1, caught
        """,
        JAX_PLATFORMS="cpu",
        JAX_COORDINATOR_ADDRESS=f"localhost:{free_port()}",
        PALM_JAX_NUM_PROCESSES="1",
        PALM_JAX_PROCESS_ID="0",
    )
    assert line == "1 True"


@needs_libtpu
def test_two_tpu_hosts_find_each_other():
    # JAX takes this machine for two hosts of Google Kubernetes Engine, with a TPU each.
    slice_of_two = {
        "JAX_PLATFORMS": "",
        "JAX_FORCE_TPU_INIT": "1",
        "TPU_WORKER_HOSTNAMES": "localhost,localhost",
        "JAX_COORDINATOR_PORT": free_port(),
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
    }
    script = """
        start.start(settings)
        import jax
        from jax._src import distributed
        state = distributed.global_state
        print(jax.config.jax_platforms, state.num_processes, state.process_id)
    """
    with concurrent.futures.ThreadPoolExecutor() as hosts:
        first, second = hosts.map(
            lambda index: output_of(script, **slice_of_two, TPU_WORKER_ID=index), "01"
        )
    assert (first, second) == (["tpu,cpu 2 0"], ["tpu,cpu 2 1"])


def refused(done: subprocess.CompletedProcess[str], kind: str, *words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"palm_jax.errors.{kind}: ")
    for word in words:
        assert word in last


def test_tpu_that_is_named_but_not_there_is_refused():
    done = execute("start.start(settings)", JAX_PLATFORMS="tpu")
    refused(done, "CannotDo", "JAX_PLATFORMS names tpu", "no TPU VM", "PALM_JAX_NUM_PROCESSES=1")


@pytest.mark.parametrize(
    "error", [OSError("metadata server: no route"), RuntimeError("DEADLINE_EXCEEDED")]
)
def test_tpu_hosts_that_do_not_meet_are_refused(monkeypatch, error):
    def fail(waits: config.Distributed) -> None:
        raise error

    monkeypatch.setattr(meeting, "_initialize", fail)
    with pytest.raises(errors.CannotDo) as caught:
        meeting.meet_tpu_hosts(config.Distributed())
    for word in ("hosts of this TPU slice", str(error), "8482", "requests"):
        assert word in str(caught.value)


THREE = {
    "JAX_COORDINATOR_ADDRESS": "localhost:8476",
    "PALM_JAX_NUM_PROCESSES": "2",
    "PALM_JAX_PROCESS_ID": "0",
}


@pytest.mark.parametrize("changes", [[], ["mesh.emulated_devices=8", "mesh.fsdp=8"]])
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**THREE, "PALM_JAX_NUM_PROCESSES": "abc"}, ["PALM_JAX_NUM_PROCESSES='abc'"]),
        ({**THREE, "PALM_JAX_NUM_PROCESSES": "0"}, ["PALM_JAX_NUM_PROCESSES='0'"]),
        ({**THREE, "PALM_JAX_PROCESS_ID": "-1"}, ["PALM_JAX_PROCESS_ID='-1'", "from 0 to 1"]),
        ({**THREE, "PALM_JAX_PROCESS_ID": "2"}, ["PALM_JAX_PROCESS_ID='2'", "from 0 to 1"]),
        ({**THREE, "JAX_COORDINATOR_ADDRESS": "localhost"}, ["'localhost'", "host:port"]),
        ({"PALM_JAX_PROCESS_ID": "0"}, ["not PALM_JAX_NUM_PROCESSES"]),
        ({"PALM_JAX_NUM_PROCESSES": "2"}, ["not JAX_COORDINATOR_ADDRESS"]),
        (
            {"PALM_JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "localhost:8476"},
            ["not PALM_JAX_PROCESS_ID"],
        ),
    ],
)
def test_wrong_description_of_processes_is_wrong_input(monkeypatch, changes, environ, words):
    for name in THREE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    # Nothing is changed before, so that this needs no process of its own.
    monkeypatch.delitem(sys.modules, "palm_jax.step", raising=False)
    before = dict(os.environ)
    with pytest.raises(errors.WrongInput) as caught:
        start.start(config.override(config.from_dict(SETTINGS), changes))
    for word in words:
        assert word in str(caught.value)
    assert dict(os.environ) == before


def test_coordinator_without_processes_is_wrong_input():
    done = execute(
        "start.start(settings)", JAX_PLATFORMS="cpu", JAX_COORDINATOR_ADDRESS="localhost:8476"
    )
    refused(done, "WrongInput", "JAX_COORDINATOR_ADDRESS is set, but not PALM_JAX_NUM_PROCESSES")


def test_emulated_devices_must_divide_among_the_processes():
    with pytest.raises(errors.WrongInput) as caught:
        start._emulate(8, 3)
    assert "mesh.emulated_devices=8" in str(caught.value)
    assert "PALM_JAX_NUM_PROCESSES=3" in str(caught.value)
