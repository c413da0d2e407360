"""The information that ``torchmpirun --groups`` and a group of ranks exchange.

torchmpirun describes a group to its ranks in an environment variable. The ranks, and the torchmpirun of the group's
job, write marks, which the torchmpirun of all groups reads.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmpi_py.launch import exit_marks

VARIABLE = "TORCHMPIRUN_GROUP"
EXPERIMENT, REASON = "experiment", "reason"  # names of the marks


@dataclass(frozen=True)
class GroupOfRanks:
    """The description of one of the ``count`` groups that a torchmpirun has started."""

    index: int
    count: int
    token: str  # Random text that all groups of a torchmpirun share.
    folder: str  # Folder of the marks, which exists only on torchmpirun's host.
    last_end: str = ""  # Message about the failure of this group's previous job.
    restart: int = 0  # Number of the group's earlier jobs.

    @property
    def text(self) -> str:
        """The value of the environment variable `VARIABLE` for the ranks of the group."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def path(self, mark: str) -> Path:
        """Return the path of a mark of this group."""
        return Path(self.folder) / f"{mark}-{self.index}"

    def record_experiment(self) -> None:
        """Write the mark that shows that an experiment is running."""
        exit_marks.leave(self.folder, self.path(EXPERIMENT).name)

    def record_no_experiment(self) -> None:
        """Remove the mark of a running experiment, after the experiment has ended and its result is stored."""
        self.path(EXPERIMENT).unlink(missing_ok=True)

    def record_end(self, reason: str) -> None:
        """Record the reason why the group's job failed, for the torchmpirun that has started the group."""
        exit_marks.leave(self.folder, self.path(REASON).name, reason)


def group_in(environment: Mapping[str, str]) -> GroupOfRanks | None:
    """Return the group of the rank with this environment; None without ``--groups``."""
    return GroupOfRanks(**json.loads(environment[VARIABLE])) if environment.get(VARIABLE) else None
