"""How a run of the bench ends early: the command line asks for what cannot be done, or a result is wrong.

Both are raised on every rank alike, so that the job ends with one message instead of a hang.
"""


class UsageError(Exception):
    """The command line asks for what does not exist or does not fit here; the message says what does."""


class WrongValue(Exception):  # noqa: N818 - the name says what happened
    """A collective gave a value that is not the right one; the message names flavour, size, rank and element."""
