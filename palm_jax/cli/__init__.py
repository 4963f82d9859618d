"""The command line: parses, calls, prints.

Exit codes: 0 done, 1 the answer is no, 2 wrong input, 3 the environment cannot do it,
4 stopped by a signal after saving, 5 a defect of palm-jax, 6 another process of the run was
lost. With --json, stdout holds one JSON object and nothing else; whatever is said on the way
goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import traceback
from typing import NoReturn

import typer

from palm_jax import meeting
from palm_jax.cli import (
    branch,
    checkpoints,
    compile,
    data,
    doctor,
    evaluate,
    export,
    generate,
    lab,
    logbook,
    memorisation,
    plan,
    replay,
    report,
    selftest,
    serve,
    spikes,
    train,
)
from palm_jax.errors import CannotDo, LostPeer, WrongInput

OUR_DEFECT = 5
# What any access to a file may meet, a print to stdout too; other errors would be ours.
_SYSTEM_REFUSES = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    errno.ENAMETOOLONG,
}

app = typer.Typer(
    name="palm-jax",
    help="Train a language model the PaLM way, and replay any step of it bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(
    epilog="Example: palm-jax train configs/quickstart.yaml steps=200 --run runs/quickstart"
)(train.train)
app.add_typer(data.app, name="data")
app.command(epilog="Example: palm-jax replay runs/quickstart --steps 100:140")(replay.replay)
app.command(
    epilog="Example: palm-jax bundle runs/quickstart --steps 100:140 --out incident.tar.gz"
)(replay.bundle)
app.add_typer(branch.app, name="branch")
app.add_typer(spikes.app, name="spikes")
app.add_typer(checkpoints.app, name="checkpoints")
app.command(
    epilog="Example: palm-jax intervene runs/quickstart --at 200 schedule.peak=0.01 "
    "--reason 'the norm drifts'"
)(branch.intervene)
app.command(epilog="Example: palm-jax logbook runs/quickstart")(logbook.logbook)
app.command(epilog="Example: palm-jax report runs/quickstart")(report.report)
app.command(
    epilog="Example: palm-jax compile configs/palm_540b.yaml --topology v4:12x16x16 --slices 2"
)(compile.compile)
app.command(epilog="Example: palm-jax doctor configs/quickstart.yaml --run runs/quickstart")(
    doctor.doctor
)
app.add_typer(plan.app, name="plan")
app.command(name="eval", epilog="Example: palm-jax eval runs/quickstart --step 100 --step 200")(
    evaluate.evaluate
)
app.command(epilog="Example: palm-jax export runs/quickstart --out exported")(export.export)
app.command(name="import", epilog="Example: palm-jax import exported --run runs/imported")(
    export.import_
)
app.command(epilog="Example: palm-jax memorisation runs/quickstart --sequences 200")(
    memorisation.memorisation
)
app.command(
    epilog="Example: palm-jax generate runs/quickstart --prompt 'def main(' --temperature 0.8"
)(generate.generate)
app.command(epilog="Example: palm-jax serve runs/quickstart --port 8000")(serve.serve)
app.add_typer(lab.app, name="lab")
app.add_typer(selftest.app, name="selftest")


def main() -> None:
    """Run the command line; a failure is one message and its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files and documents need not be Unicode.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (WrongInput, CannotDo, LostPeer) as error:
        _end(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _SYSTEM_REFUSES:
            _end(f"error: {error}; make room, or name another place", CannotDo.exit_code)
        message = f"{traceback.format_exc()}This is a defect of palm-jax, not of your input."
        _end(message, OUR_DEFECT)


def _end(message: str, exit_code: int) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it; the exit code still tells
        print(message, file=sys.stderr)
    if meeting.have_met():
        # Without JAX's farewell, which would wait for the other processes.
        meeting.leave(exit_code)
    sys.exit(exit_code)
