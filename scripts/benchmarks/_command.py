"""How a benchmark ends that cannot do what it was asked for."""

from __future__ import annotations

import collections.abc
import sys

from palm_jax.errors import CannotDo, WrongInput


def run(main: collections.abc.Callable[[], None]) -> None:
    """Call `main`; what it is refused becomes a line and an exit code, as of `palm-jax`."""
    try:
        main()
    except (WrongInput, CannotDo) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
