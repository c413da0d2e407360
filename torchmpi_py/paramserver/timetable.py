"""The steps in which a worker exchanges values with a parameter server."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torchmpi_py.core.tensors import check_count


class Due(NamedTuple):
    """The actions that are due in a step, in this order; with F = U the fetch comes last."""

    shard: bool
    send: bool
    prefetch: bool
    integrate: bool


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps in which a worker exchanges values with a server.

    With D = ``init_delay``, U = ``update_frequency``, F = ``prefetch`` and S = ``send_frequency``: the server is seeded
    in step D; updates are sent every S steps after D; the server's values are integrated every U steps after D, and are
    fetched F steps before each integration. A step sends before it fetches: with F = 0 a worker gets back what it has
    just sent. With F = U a step fetches, after its own integration, the values for the next one. A send that belongs to
    an integration (EASGD) follows the integration.

    ValueError unless 0 <= prefetch <= update_frequency, and the frequencies are at least 1.
    """

    init_delay: int = 100
    update_frequency: int = 10
    prefetch: int = 0
    send_frequency: int = 1

    def __post_init__(self) -> None:
        for name, least in (("init_delay", 0), ("update_frequency", 1), ("prefetch", 0), ("send_frequency", 1)):
            check_count(name, getattr(self, name), least, "steps")
        if self.prefetch > self.update_frequency:
            raise ValueError(
                f"prefetch={self.prefetch} is more than update_frequency={self.update_frequency}: values would be "
                "fetched before those that precede them are integrated"
            )

    def at(self, step: int) -> Due:
        """The actions that are due in a step; steps count from 0."""
        since = step - self.init_delay
        return Due(
            shard=since == 0,
            send=since > 0 and since % self.send_frequency == 0,
            prefetch=since >= 0 and since + self.prefetch > 0 and (since + self.prefetch) % self.update_frequency == 0,
            integrate=since > 0 and since % self.update_frequency == 0,
        )

    def describe(self, num_steps: int) -> str:
        """A text with a line for each of the first ``num_steps`` steps in which an action is due."""
        lines = []
        for step in range(num_steps):
            due = [name for name, is_due in self.at(step)._asdict().items() if is_due]
            if due:
                lines.append(f"{step:6}  {', '.join(due)}")
        return "\n".join(lines)
