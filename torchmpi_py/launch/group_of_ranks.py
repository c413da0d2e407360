"""A group of ``torchmpirun --groups``, as its ranks know it, and the marks by which rank 0 tells torchmpirun of it."""

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
    token: str  # the same for all of these groups
    folder: str  # where marks go; on torchmpirun's host alone
    last_end: str = ""  # how this group's previous job failed
    restart: int = 0  # how many jobs it has had before

    @property
    def text(self) -> str:
        """The value of `VARIABLE` in the group's ranks."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def path(self, mark: str) -> Path:
        """The file of a mark."""
        return Path(self.folder) / f"{mark}-{self.index}"

    def record_experiment(self) -> None:
        """Leave that an experiment is under way."""
        exit_marks.leave(self.folder, self.path(EXPERIMENT).name)

    def record_no_experiment(self) -> None:
        """Remove that mark: the experiment has ended, and is recorded."""
        self.path(EXPERIMENT).unlink(missing_ok=True)

    def record_end(self, reason: str) -> None:
        """Leave why the group's job failed."""
        exit_marks.leave(self.folder, self.path(REASON).name, reason)


def group_in(environment: Mapping[str, str]) -> GroupOfRanks | None:
    """The group that this rank belongs to; None without ``--groups``."""
    return GroupOfRanks(**json.loads(environment[VARIABLE])) if environment.get(VARIABLE) else None
