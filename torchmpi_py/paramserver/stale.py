"""Bounded staleness (SSP): a worker may run ahead of the slowest worker by at most ``staleness`` steps.

Every worker has a *clock*, the number of steps that the worker has completed. In each step, a worker sends the change
that its optimizer made, and advances its clock. Before step c, it sleeps until the slowest clock is at c - s or later,
where s is the staleness. In step c, its parameters contain all of its own updates, the updates of all workers from the
steps before c - s, and perhaps some later updates of other workers. A worker fetches only if the values of its last
fetch are too old for its next step. Workers of equal speed fetch every s + 1 steps.

The alternatives are Downpour, which does not bound the distance between workers, and synchronous training, in which
every step takes as long as the slowest worker's step. With s = 0, the method is synchronous training. In that case, no
worker may fetch an update of the step that has just started. So a second set of clocks counts the fetches of each
worker, and a worker sends only after all workers have fetched.

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
_END_OF_TIME = 1 << 62  # clock of a rank for which no worker has to wait
_LONGEST_NAP_SECONDS = 0.01


class StaleSynchronousUpdate(Update):
    """Train with bounded staleness: a worker may be at most ``staleness`` steps ahead of the slowest worker.

    Call ``update(step)`` on every rank after each step of the optimizer, which may be any torch optimizer. The call
    returns when the next step may start. In step ``init_delay``, all workers adopt rank 0's parameters. A worker that
    takes fewer steps than other workers must call ``finish`` or ``free`` after its last step, so that the other workers
    do not wait for it. All ranks of the sharding level must call the constructor.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        staleness (int): number of steps by which the fastest worker may be ahead of the slowest worker; 0 is
            synchronous training.
        scale (float): factor by which the optimizer's changes are multiplied. Default None, 1 / number of workers, so
            that the learning rate can be the same as for one process that trains on all data. The paper uses 1.
        **options: other arguments of ``Update``: ``init_delay``, ``sharding_communicator`` and
            ``dataparallel_communicator``. ``update_frequency``, ``prefetch`` and ``send_frequency`` are not accepted.

    Raises:
        TypeError: an option is not accepted.
        ValueError: ``staleness`` is not an int of at least 0, or ``init_delay`` is out of range.
        RanksDisagree: the ranks pass different settings, or train different parameters.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> stale = mpi.paramserver.StaleSynchronousUpdate(network, staleness=2, init_delay=0)
        >>> for step in range(5):
        ...     optimizer.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     stale.update(step)
        >>> stale.take_result()
        >>> stale.free()

    Source: Ho et al.: More effective distributed ML via a stale synchronous parallel parameter server (2013).
    """

    def __init__(self, network: torch.nn.Module, *, staleness: int, scale: float | None = None, **options: Any) -> None:
        refused = ["update_frequency", "prefetch", "send_frequency"]
        refuse_options("StaleSynchronousUpdate", options, refused, "every step sends, and a step fetches if necessary")
        check_count("staleness", staleness, 0, "steps")
        super().__init__(network, **options)
        self.check_alike(staleness=staleness)
        self.staleness = staleness
        self.scale = 1 / self.num_workers if scale is None else scale
        self.clock = 0
        self._slowest = 0  # the slowest clock at the time of the last fetch
        self._completed: Clocks | None = None
        self._fetched: Clocks | None = None
        self._before: list[Tensor] = []  # copies of the parameters before the optimizer's step
        self._is_finished = False

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values. All ranks of the sharding level must call it."""
        self.adopt(served)
        self._before = [p.detach().clone() for p in self.parameters]
        # The constructor of Clocks synchronizes the ranks, so that no worker sends before all workers have fetched.
        self._completed = Clocks(self.sharding, self.is_root)
        if self.staleness == 0:
            self._fetched = Clocks(self.sharding, self.is_root)

    def exchange(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """Send the change of the parameters in this step, and return when the next step may start."""
        if self._is_finished:
            raise ParameterServerError(f"update({step}): this worker has called finish; call it after the last step")
        if due.shard:
            return
        assert self._completed is not None, "begin creates the clocks"
        updates = self._scaled_changes()
        if self.is_root:
            # With staleness 0, no worker may fetch an update of its current step. Wait until all workers have fetched.
            if self._fetched is not None:
                self._fetched.wait_for(self.clock)
            tensor_lists.send_tensors(served, updates, "add")
            # The requests of a rank are carried out in order, so the clock advances after the updates.
            self._completed.advance()
        self.clock += 1
        # If the values of the last fetch are too old for the next step, wait for the slowest worker, and fetch again.
        is_fresh = self.is_root and self.clock - self._slowest > self.staleness
        if is_fresh:
            self._check_still_trained(step)
            self._slowest = self._completed.wait_for(self.clock - self.staleness)
            self.integrate(served)
            if self._fetched is not None:
                self._fetched.advance()
        # All ranks of a group make the same change in a step, so only fetched values have to be copied to the group.
        if self.group is not None and self._flag_of_root(self.group, is_fresh):
            self.share()
            copy_all(self._before, self.parameters)

    def finish(self) -> None:
        """End the training of this worker, so that no other worker waits for it.

        The call returns when the server has all updates of this worker. Any rank may call it alone, and repeated calls
        have no effect.

        Raises:
            ParameterServerError: a send has failed.
        """
        try:
            super().finish()
        finally:
            if not self._is_finished and self.is_root:
                for clocks in filter(None, (self._completed, self._fetched)):
                    clocks.advance(_END_OF_TIME)
            self._is_finished = True

    def free(self) -> None:
        """Call ``finish``, and free the servers.

        All ranks of the sharding level must call it. Repeated calls have no effect.
        """
        try:
            self.finish()
        finally:
            for clocks in filter(None, (self._completed, self._fetched)):
                clocks.free()
            self._completed = self._fetched = None
            super().free()
            self._before = []

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values, which contain all updates of this worker."""
        self.adopt(served)
        copy_all(self._before, self.parameters)

    @torch.no_grad()
    def _scaled_changes(self) -> list[Tensor]:
        """Scale the changes that the optimizer made. Update the parameters, and return the scaled changes."""
        changes = []
        for p, before in zip(self.parameters, self._before, strict=True):
            changes.append((p - before).mul_(self.scale))
            p.copy_(before.add_(changes[-1]))
        return changes

    def _flag_of_root(self, group: Communicator, flag: bool) -> bool:
        """Return the root's flag on all ranks of the group. Ranks sleep while the root waits for a slow worker."""
        flags = bytearray([flag])

        def receive() -> None:
            complete(group.direct.mpi.Ibcast(flags, 0), Nap(_LONGEST_NAP_SECONDS))

        journal.run_together("StaleSynchronousUpdate.update", group, receive)
        return bool(flags[0])


class Clocks:
    """One clock per rank, stored in a small parameter server. Each rank advances its own clock and reads all clocks.

    All ranks of ``comm`` must call the constructor. A rank with ``is_worker=False`` never delays other ranks.
    """

    def __init__(self, comm: Communicator, is_worker: bool = True) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        start = 0 if is_worker else _END_OF_TIME
        self._server = init(torch.full((comm.size,), start, dtype=torch.int64, device="cpu"), comm=comm)

    def advance(self, steps: int = 1) -> None:
        """Advance this rank's clock after all earlier requests of this rank. Return without waiting."""
        increments = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        increments[self._rank] = steps
        self._server.send(increments, "add")

    def wait_for(self, least: int) -> int:
        """Sleep until all clocks are at ``least`` or later, and return the slowest clock."""
        clocks = self._server.receive().wait()
        while (slowest := int(clocks.min())) < least:
            name = f"bounded staleness, for rank {int(clocks.argmin())} of {self._comm.key!r}"
            journal.run_alone(name, self._comm, lambda: self._wait_beyond(slowest, least, clocks))
        return slowest

    def _wait_beyond(self, slowest: int, least: int, clocks: Tensor) -> None:
        """Sleep until the slowest clock advances. **Overwrites** ``clocks``. Log a warning if the wait is long."""
        nap, warn_at = Nap(_LONGEST_NAP_SECONDS), WARN_AFTER_SECONDS
        while int(clocks.min()) == slowest:
            if nap.seconds > warn_at:
                warn_at += max(WARN_AFTER_SECONDS, nap.seconds)
                here, last = int(clocks[self._rank]), int(clocks.argmin())
                text = "bounded staleness: rank %d (at step %d) has waited %.0f s for step %d of rank %d (at step %d)"
                logger.warning(text, self._rank, here, nap.seconds, least, last, slowest)
            nap.take()
            self._server.peek(clocks)

    def free(self) -> None:
        """Free the server of the clocks. All ranks must call it. Repeated calls have no effect."""
        self._server.free()
