"""Whether this machine can run a job, and what to do where it cannot: ``python -m torchmpi_py.doctor``.

Each check gives findings: *ok*, *warning* (a job runs, but slower or with less), or *problem*, each of the latter two
with a remedy. The checks import the standard library only, so that they work where torch or MPI do not: what needs
these is asked of child processes (``probes``). The last check is a job of two ranks (``trial``).
"""

import dataclasses

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of a check: the subject, what was found, and a remedy unless the level is ``OK``."""

    level: str
    subject: str
    text: str
    remedy: str = ""
