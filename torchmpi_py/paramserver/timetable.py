"""The steps in which a worker exchanges values with a parameter server."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torchmpi_py.core.tensors import check_count


class Due(NamedTuple):
    """The actions that are due in a step, in the order of execution.

    ``shard`` creates the server, ``send`` sends an update, ``prefetch`` starts a fetch, and ``integrate`` changes the
    parameters according to the fetched values. If ``prefetch`` equals ``update_frequency`` in the timetable, a fetch
    starts after the integration.
    """

    shard: bool
    send: bool
    prefetch: bool
    integrate: bool


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps in which a worker exchanges values with a server.

    Let D be ``init_delay``, U ``update_frequency``, F ``prefetch`` and S ``send_frequency``. The server is created in
    step D. Updates are sent every S steps after D. The server's values are integrated every U steps after D, and each
    fetch starts F steps before the integration. A step sends before it fetches, so with F = 0 the fetched values
    contain the worker's own last update. With F = U, a step first integrates, and then fetches the values for the next
    integration. EASGD sends after it has integrated.

    Args:
        init_delay (int): step in which the server is created, from 0. Default 100.
        update_frequency (int): number of steps from one integration to the next, at least 1. Default 10.
        prefetch (int): number of steps from the start of a fetch to its integration, at most ``update_frequency``;
            default 0.
        send_frequency (int): number of steps from one send to the next, at least 1. Default 1.

    Raises:
        ValueError: a number is not an int, or is out of range.

    Examples:
        >>> timetable = mpi.paramserver.Timetable(init_delay=1, update_frequency=2, prefetch=1, send_frequency=2)
        >>> print(timetable.describe(num_steps=6))
             1  shard
             2  prefetch
             3  send, integrate
             4  prefetch
             5  send, integrate
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
                f"prefetch={self.prefetch} is more than update_frequency={self.update_frequency}, so a fetch would "
                "start before the values of the previous fetch are integrated; pass a smaller prefetch"
            )

    def at(self, step: int) -> Due:
        """Return the actions that are due in a step.

        Args:
            step (int): number of the step, from 0.

        Returns:
            A named tuple of the flags ``shard``, ``send``, ``prefetch`` and ``integrate``.
        """
        since = step - self.init_delay
        return Due(
            shard=since == 0,
            send=since > 0 and since % self.send_frequency == 0,
            prefetch=since >= 0 and since + self.prefetch > 0 and (since + self.prefetch) % self.update_frequency == 0,
            integrate=since > 0 and since % self.update_frequency == 0,
        )

    def describe(self, num_steps: int) -> str:
        """Return a text that lists the due actions, with one line for each step that has due actions.

        Args:
            num_steps (int): number of steps to describe, from step 0.

        Returns:
            The lines, without a newline at the end.
        """
        lines = []
        for step in range(num_steps):
            due = [name for name, is_due in self.at(step)._asdict().items() if is_due]
            if due:
                lines.append(f"{step:6}  {', '.join(due)}")
        return "\n".join(lines)
