"""Bounded staleness (SSP): workers run ahead of each other, but not further than agreed.

Every worker has a *clock*, the number of steps it has completed. In each step it adds what its optimizer changed to the
server, and advances its clock. It begins step c only once the slowest clock is at c - s or later, s = ``staleness``:
until then it waits, asleep. Its parameters contain all updates of the steps before c - s of every worker, all of its
own, and perhaps some later ones. So a worker fetches only when the values that it fetched last are too old for the step
that it is about to begin: with workers of equal speed every s + 1 steps.

With s = 0 this is synchronous training. Then no worker may see an update of the step that has just begun, either, so a
second set of clocks counts how often each worker has fetched, and an update is sent when all have done so.

Source: Ho et al.: More effective distributed ML via a stale synchronous parallel parameter server (2013); Cui et al.:
Exploiting bounded staleness to speed up big data analytics (2014).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import journal
from torchmpi_py.core.backoff import Nap, complete
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import check_count
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.server import init
from torchmpi_py.paramserver.timetable import Due
from torchmpi_py.paramserver.update import Update, copy_all, refuse_options

logger = logging.getLogger("torchmpi_py")
WARN_AFTER_SECONDS = 20.0
_END_OF_TIME = 1 << 62  # the clock of a worker for which no worker has to wait
_LONGEST_NAP_SECONDS = 0.01


class StaleSynchronousUpdate(Update):
    """Call ``update(step)`` after the optimizer's step: it returns when the next step may begin.

    staleness: how many steps the fastest worker may be ahead of the slowest one; 0 is synchronous training.
    scale: the factor of the optimizer's changes; by default 1 / number of workers, so that the learning rate is that of
        one process with all the data. The paper has 1.
    init_delay, sharding_communicator, dataparallel_communicator: as for ``Update``. In step ``init_delay`` all workers
    take rank 0's parameters. Any optimizer will do: each worker has its own.

    A worker that trains fewer steps than others calls ``finish``, or ``free``, so that they do not wait for it.
    """

    def __init__(self, network: torch.nn.Module, *, staleness: int, scale: float | None = None, **options: Any) -> None:
        refused = ["update_frequency", "prefetch", "send_frequency"]
        refuse_options("StaleSynchronousUpdate", options, refused, "it sends in every step, and fetches when due")
        check_count("staleness", staleness, 0, "steps")
        super().__init__(network, **options)
        self.check_alike(staleness=staleness)
        self.staleness = staleness
        self.scale = 1 / self.num_workers if scale is None else scale
        self.clock = 0
        self._slowest = 0  # the slowest clock before the last fetch
        self._completed: Clocks | None = None
        self._fetched: Clocks | None = None
        self._before: list[Tensor] = []  # the parameters before the optimizer's step
        self._is_finished = False

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """All workers start from the server's parameters. Collective."""
        self.adopt(served)
        self._before = [p.detach().clone() for p in self.parameters]
        self._completed = Clocks(self.sharding, self.is_root)  # collective: nobody sends before all have fetched
        if self.staleness == 0:
            self._fetched = Clocks(self.sharding, self.is_root)

    def exchange(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """Send what this step has changed, and return when the next one may begin."""
        if self._is_finished:
            raise ParameterServerError(f"update({step}): this worker has called finish; leave that to its last step")
        if due.shard:
            return
        assert self._completed is not None, "begin has made it"
        updates = self._scaled_changes()
        if self.is_root:
            # With staleness 0 no worker may fetch what belongs to the step that it has just begun.
            if self._fetched is not None:
                self._fetched.wait_for(self.clock)
            tensor_lists.send_tensors(served, updates, "add")
            self._completed.advance()  # a rank's requests are carried out in their order: after the updates
        self.clock += 1
        # The values fetched last are too old for the next step: wait for the slowest worker, and fetch.
        is_fresh = self.is_root and self.clock - self._slowest > self.staleness
        if is_fresh:
            self._check_still_trained(step)
            self._slowest = self._completed.wait_for(self.clock - self.staleness)
            self.integrate(served)
            if self._fetched is not None:
                self._fetched.advance()
        # The ranks of a group have made the same change; only fetched values have to be shared.
        if self.group is not None and self._flag_of_root(self.group, is_fresh):
            self.share()
            copy_all(self._before, self.parameters)

    def finish(self) -> None:
        """After a worker's last step: no worker waits for it any more. Returns when the server has all of its updates.

        Not collective; idempotent.
        """
        try:
            super().finish()
        finally:
            if not self._is_finished and self.is_root:
                for clocks in filter(None, (self._completed, self._fetched)):
                    clocks.advance(_END_OF_TIME)
            self._is_finished = True

    def free(self) -> None:
        """Finish, and free the servers. Collective over the level of sharding; idempotent."""
        try:
            self.finish()
        finally:
            for clocks in filter(None, (self._completed, self._fetched)):
                clocks.free()
            self._completed = self._fetched = None
            super().free()
            self._before = []

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values, which contain what this worker has sent."""
        self.adopt(served)
        copy_all(self._before, self.parameters)

    @torch.no_grad()
    def _scaled_changes(self) -> list[Tensor]:
        """The changes of the optimizer's step, scaled. The parameters keep the scaled change alone."""
        changes = []
        for p, before in zip(self.parameters, self._before, strict=True):
            changes.append((p - before).mul_(self.scale))
            p.copy_(before.add_(changes[-1]))
        return changes

    def _flag_of_root(self, group: Communicator, flag: bool) -> bool:
        """The root's flag on all ranks of the group, which sleep: the root may have to wait for a slow worker."""
        flags = bytearray([flag])

        def receive() -> None:
            complete(group.direct.mpi.Ibcast(flags, 0), Nap(_LONGEST_NAP_SECONDS))

        journal.run_together("StaleSynchronousUpdate.update", group, receive)
        return bool(flags[0])


class Clocks:
    """A number for each rank, which that rank alone advances, and all can read: a small server. Made collectively.

    The clocks of ranks that are not ``used`` stand at the end of time.
    """

    def __init__(self, comm: Communicator, used: bool = True) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        start = 0 if used else _END_OF_TIME
        self._server = init(torch.full((comm.size,), start, dtype=torch.int64, device="cpu"), comm=comm)

    def advance(self, steps: int = 1) -> None:
        """Advance this rank's clock behind all earlier requests of this rank. Does not wait for them."""
        moved = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        moved[self._rank] = steps
        self._server.send(moved, "add")

    def wait_for(self, least: int) -> int:
        """Sleep until all clocks are at ``least`` or later; where the slowest one is then."""
        clocks = self._server.receive().wait()
        while (slowest := int(clocks.min())) < least:
            name = f"bounded staleness, for rank {int(clocks.argmin())} of {self._comm.key!r}"
            journal.run_alone(name, self._comm, lambda: self._wait_beyond(slowest, least, clocks))
        return slowest

    def _wait_beyond(self, slowest: int, least: int, clocks: Tensor) -> None:
        """Sleep until the slowest clock advances; warn when the wait is long. ``clocks`` are updated in place."""
        nap, warn_at = Nap(_LONGEST_NAP_SECONDS), WARN_AFTER_SECONDS
        while int(clocks.min()) == slowest:
            if nap.seconds > warn_at:
                warn_at += max(WARN_AFTER_SECONDS, nap.seconds)
                here, last = int(clocks[self._rank]), int(clocks.argmin())
                text = (
                    "bounded staleness: rank %d, at clock %d, has waited %.0f s for clock %d of rank %d, which is at %d"
                )
                logger.warning(text, self._rank, here, nap.seconds, least, last, slowest)
            nap.take()
            self._server.peek(clocks)

    def free(self) -> None:
        """Free the server. Collective; idempotent."""
        self._server.free()
