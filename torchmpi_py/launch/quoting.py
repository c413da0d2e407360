"""The program's arguments on their way through an MPI's starter, some of which it would take for its own.

Open MPI, MPICH and srun read a bare ``:`` as the beginning of another program. Open MPI rewrites ``--bind-to`` and
others wherever they stand. The first character of such a word becomes ``%3A``, say, and each ``%`` then ``%25``.
"""

import re


def is_needed(words: list[str], interpreted: str) -> bool:
    """Whether a starter interprets one of the words; ``interpreted`` is a regular expression of those that it does."""
    return any(re.fullmatch(interpreted, word) for word in words)


def quote(words: list[str], interpreted: str) -> list[str]:
    """The words in a form that the starter leaves alone."""
    plain = [word.replace("%", "%25") for word in words]
    return [f"%{ord(word[0]):02X}{word[1:]}" if re.fullmatch(interpreted, word) else word for word in plain]


def unquote(words: list[str]) -> list[str]:
    """What was quoted."""
    return [re.sub("%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), word) for word in words]
