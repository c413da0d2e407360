"""At which steps a worker exchanges what with a parameter server: plain arithmetic.

With D = ``init_delay``, U = ``update_frequency``, F = ``prefetch`` and S = ``send_frequency``: the server is seeded at
step D; updates are sent every S steps after D; its values are integrated every U steps after D, and for each
integration they are fetched F steps before it. What is sent in a step is sent before anything is fetched in it: with
F = 0 a worker gets back what it has just sent. With F = U, though, what a step fetches is for the integration after
that of the same step, and is fetched behind it. What belongs to an integration (EASGD's send) follows it.

Source: TorchMPI's ``Update`` (reference 5.8), as it was meant: it fetched F steps too late, and one skipped step
stopped it for ever.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Due(NamedTuple):
    """What there is to do in a step, in this order; with F = U the fetch comes last."""

    shard: bool
    send: bool
    prefetch: bool
    integrate: bool


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps. ValueError unless 0 <= prefetch <= update_frequency, and the frequencies are at least 1."""

    init_delay: int = 100
    update_frequency: int = 10
    prefetch: int = 0
    send_frequency: int = 1

    def __post_init__(self) -> None:
        for name, least in (("init_delay", 0), ("update_frequency", 1), ("prefetch", 0), ("send_frequency", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: give a whole number of steps, at least {least}")
        if self.prefetch > self.update_frequency:
            raise ValueError(
                f"prefetch={self.prefetch} is more than update_frequency={self.update_frequency}: values would be "
                "fetched before those that precede them are integrated"
            )

    def at(self, step: int) -> Due:
        """What is due in a step; steps count from 0."""
        since = step - self.init_delay
        return Due(
            shard=since == 0,
            send=since > 0 and since % self.send_frequency == 0,
            prefetch=since >= 0 and since + self.prefetch > 0 and (since + self.prefetch) % self.update_frequency == 0,
            integrate=since > 0 and since % self.update_frequency == 0,
        )

    def describe(self, num_steps: int) -> str:
        """What is due in the first ``num_steps`` steps, a line for each in which something is."""
        lines = []
        for step in range(num_steps):
            due = [name for name, is_due in self.at(step)._asdict().items() if is_due]
            if due:
                lines.append(f"{step:6}  {', '.join(due)}")
        return "\n".join(lines)
