"""A group of ``torchmpirun --groups`` as its ranks see it, and the marks that rank 0 leaves for torchmpirun."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmpi_py.launch import exit_marks

VARIABLE = "TORCHMPIRUN_GROUP"
EXPERIMENT, REASON = "experiment", "reason"  # the marks


@dataclass(frozen=True)
class GroupOfRanks:
    """One of ``count`` groups that a torchmpirun has started."""

    index: int
    count: int
    token: str  # the same for all groups of one torchmpirun
    folder: str  # folder of the marks, on torchmpirun's host only
    last_end: str = ""  # how this group's previous job failed
    restart: int = 0  # number of the group's earlier jobs

    @property
    def text(self) -> str:
        """The value of `VARIABLE` in the group's ranks."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def path(self, mark: str) -> Path:
        """Return the file of a mark."""
        return Path(self.folder) / f"{mark}-{self.index}"

    def record_experiment(self) -> None:
        """Leave the mark that an experiment is running."""
        exit_marks.leave(self.folder, self.path(EXPERIMENT).name)

    def record_no_experiment(self) -> None:
        """Remove the mark that an experiment is running, because the experiment has ended and is recorded."""
        self.path(EXPERIMENT).unlink(missing_ok=True)

    def record_end(self, reason: str) -> None:
        """Record why the group's job failed."""
        exit_marks.leave(self.folder, self.path(REASON).name, reason)


def group_in(environment: Mapping[str, str]) -> GroupOfRanks | None:
    """Return the group of this rank; None without ``--groups``."""
    return GroupOfRanks(**json.loads(environment[VARIABLE])) if environment.get(VARIABLE) else None
