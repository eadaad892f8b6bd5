"""Errors that a user can act on. The command line prints them in a line or a few, without a traceback."""


class UserError(Exception):
    """A path, setting or folder from the user cannot be used. The message names it and the way out."""

    exit_code = 2


class RunError(UserError):
    """A sound request cannot continue: a full disk, a damaged checkpoint, a non-finite loss."""

    exit_code = 1


class LostContact(RunError):
    """Another rank has ended, and this one cannot go on without it. That one's error is the one to read."""

    exit_code = 3
