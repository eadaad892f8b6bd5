"""Errors that a person can act on. The command line prints them as a line, or a few, without a traceback."""


class UserError(Exception):
    """Something the user gave cannot be used: a path, a setting, a folder. The message names it and the way out."""

    exit_code = 2


class RunError(UserError):
    """The request was sound but the run cannot go on: a full disk, a damaged checkpoint, a loss that is not finite."""

    exit_code = 1
