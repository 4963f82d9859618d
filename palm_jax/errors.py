"""The ways in which a person's request can fail, and the exit code of each."""


class WrongInput(ValueError):
    """Something the caller gave is wrong. The message names it, its value and a remedy."""

    exit_code = 2


class CannotDo(RuntimeError):
    """The request is sound, but this machine, folder or environment cannot fulfil it."""

    exit_code = 3


class LostPeer(RuntimeError):
    """Another process of the run has ended, or does not answer. The message names it."""

    exit_code = 6
