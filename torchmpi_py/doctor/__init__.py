"""Check whether this machine can run a job, and suggest remedies: ``python -m torchmpi_py.doctor``.

Each check yields findings: *ok*, *warning* (a job runs, but slower or with fewer features), or *problem*. Warnings and
problems have a remedy. The checks import only the standard library, so that they work even if torch or MPI fail. Child
processes (``probes``) load torch and MPI. The last check is a job of two ranks (``trial``).
"""

import dataclasses

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check: its subject, a description, and a remedy unless the level is ``OK``."""

    level: str
    subject: str
    text: str
    remedy: str = ""
