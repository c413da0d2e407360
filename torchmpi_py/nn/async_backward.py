"""Reduce gradients while the backward pass is still computing other gradients.

The idea: autograd calls a hook when it has accumulated the gradient of a parameter. The hook copies the gradient into
its bucket and launches every bucket that is complete, in the fixed order of the buckets. At the end of the backward
pass a callback launches the remaining buckets, with zeros for parameters without a gradient. So the communication of
one bucket overlaps the computation of the next gradients.

An alternative is to launch each bucket as soon as it is complete, in any order. It was rejected because ranks may
complete their buckets in different orders, for example if one rank skips a layer in a step. Collectives are matched by
their order, so gradients of different layers would be added to each other. The fixed order costs some overlap in
networks that complete buckets out of order. A second alternative is torch's DistributedDataParallel, which searches the
graph for unused parameters in each step (``find_unused_parameters``). It was rejected because it needs
torch.distributed and replaces the module.

The protocol of one step:

1. First gradient: check that no earlier reduction is pending, and queue the callback (``_begin_pass``).
2. Each gradient: insert the gradient, and launch the complete buckets (``_on_gradient``).
3. End of the pass: launch the remaining buckets. Then reduce the flags, which mark the parameters that have a gradient
   (``_end_pass``). The numbers appended to the flags reveal ranks that are in different steps (``launch_order``).
4. ``synchronize``: wait for the reductions, and make each ``p.grad`` a view of its bucket.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchmpi_py.collectives import verbs
from torchmpi_py.core import mpi_api
from torchmpi_py.core.communicators import Communicator, resolve, stack
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.core.tensors import check_count
from torchmpi_py.nn.absent_gradients import AbsentGradient
from torchmpi_py.nn.buckets import Buckets, buckets_of
from torchmpi_py.nn.compression import Compression
from torchmpi_py.nn.launch_order import LaunchOrder
from torchmpi_py.nn.members import parameters_of
from torchmpi_py.nn.synchronize import ParametersOf, parameters_to_reduce, reduced_in_backward

BucketFactory = Callable[[torch.nn.Module, list[torch.nn.Parameter], Communicator], Buckets]

_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__  # code that calls Function.backward


class AsyncBackward:
    """The registration of a module whose gradients are reduced during ``backward``.

    ``register_async_backward`` creates the registration. Call ``synchronize()`` after each ``backward()`` and before
    you read gradients. A second backward pass before ``synchronize()`` raises RuntimeError, because it would add to
    gradients that are being reduced. To accumulate gradients over several passes, use ``frequency``. The loss of each
    rank must depend on at least one parameter.

    Activation checkpointing works with ``use_reentrant=False``. With ``use_reentrant=True``, one backward pass consists
    of several passes, and RuntimeError is raised unless one of these passes computes all the gradients.

    Every rank of ``comm`` must create the registration, with the same arguments.

    Args:
        module (torch.nn.Module): module whose trainable parameters are reduced.
        frequency (int): number of backward passes per reduction; default 1.
        average (bool): True (default) divides the sum by the number of ranks; False keeps the sum.
        comm (Communicator): ranks to reduce over; default None, the current level.
        parameters (callable): function that takes the module and returns the parameters to reduce. It is called at the
            registration and in each backward pass; the default returns all parameters.
        make_buckets (callable): function that creates the buckets from the module, its parameters and ``comm``.
        owner (object): optimizer that uses this registration, or None (default). The optimizer's ``check_pass`` is
            called at the first gradient of a backward pass, and its ``wait_in_pass`` at the end of a pass that reduces.

    Raises:
        TypeError: ``module`` is not a module, or a parameter is a DTensor.
        ValueError: ``frequency`` is below 1, or another registration already reduces one of the parameters.
        RanksDisagree: on every rank, if the parameters differ between ranks in name, shape or dtype.
    """

    compares_steps = True
    """Whether the ranks compare how many parameter updates each rank has made since the last reduction."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        frequency: int = 1,
        average: bool = True,
        comm: Communicator | None = None,
        parameters: ParametersOf = parameters_of,
        make_buckets: BucketFactory = buckets_of,
        owner: Any = None,
    ) -> None:
        call, passes = "register_async_backward", "frequency"
        if owner is not None:
            call, passes = type(owner).__name__, "backward_passes_per_step"
        self.frequency = check_count(f"{call}: {passes}", frequency, 1, "backward passes")
        self.op = "avg" if average else "sum"
        _remove_former()
        named = parameters_to_reduce(call, module, resolve(comm), parameters)
        self.names = {p: name for name, p in named.items()}
        self.buckets: Buckets = make_buckets(module, list(self.names), resolve(comm))
        self._owner = weakref.ref(self if owner is None else owner)
        self._parameters = parameters
        self._lock = threading.Lock()
        self.num_passes = 0  # complete passes since the last reduction
        self._pass_id = -1  # autograd's ID of the current backward pass
        self._end: Callable[[], object | None] = lambda: None  # returns the callback of the current pass, or None
        self.order = LaunchOrder(self.buckets.comm)
        self._handles: list[Handle[Any]]  # handles of the launched reductions
        self._start_reduction()
        self._flags: Handle[Tensor] | None = None  # reduction of the flags, pending until synchronize()
        self._module = weakref.ref(module)
        hook = _while_alive(self._on_gradient)
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(hook) for p in self.names]  # type: ignore[no-untyped-call]
        registered.setdefault(module, []).append(self)
        reduced_in_backward.add(self)

    def check_pass(self) -> None:
        """Do nothing: a registration without an optimizer is its own owner."""

    wait_in_pass = check_pass

    def synchronize(self) -> None:
        """Wait until the gradients of the last backward pass are reduced. Every rank must make this call.

        ``p.grad`` of each parameter becomes a view of the reduced bucket. After a pass that only accumulates (see
        ``frequency``), the call does nothing. A parameter without a gradient on any rank keeps None, unless compression
        has kept a part of the parameter's earlier gradients.

        Raises:
            RuntimeError: the backward pass computed gradients only for parameters that became trainable after the
                registration.
            RanksDisagree: on every rank, if the ranks are in different steps, or if their backward passes reached
                several registrations in different orders.
        """
        if self._flags is not None:
            self._finish()
        elif self._hooks:
            self._check_parameters()  # A pass that reached no registered parameter has not made this check.

    def _finish(self) -> None:
        """Wait for the pending reduction, and set each ``p.grad``."""
        assert self._flags is not None
        flags = self._flags
        handles, is_late = [*self._handles, flags], False
        try:
            wait_all(handles)
        except BaseException as error:  # After a timeout or a signal, the next call waits again.
            is_late = all(error is not each._error for each in handles)
            raise
        finally:
            if not is_late:
                self.num_passes, self._num_launched, self._handles, self._flags = 0, 0, [], None
        self.buckets.finish(self.op, self.order.checked(flags.wait()))

    def reduce_now(self) -> None:
        """Reduce the current gradients, without waiting for ``frequency`` passes.

        Call this on a rank that ran no backward pass in this step, or fewer passes than the other ranks. Every rank
        must reduce its gradients in this step, but on the other ranks the backward pass may have started the reduction.

        Raises:
            RuntimeError: the module has parameters that are new or changed since the registration.
            RanksDisagree: on every rank, if the ranks are in different steps.
        """
        self._check_parameters()
        if self._flags is None:  # If flags are pending, an earlier wait was interrupted.
            self._start_reduction()
            self._end_reduction()
        self._finish()

    def restart(self) -> None:
        """Drop the gradients, and the data that compression keeps between steps. Every rank must make this call.

        Call this method after you load an earlier state into the module and the optimizer.
        """
        if self._flags is not None:
            self._finish()
        self.order.has_loaded = True
        self.num_passes = 0
        for parameter in self.names:
            parameter.grad = None
        if any(bucket.has_state for bucket in self.buckets.all):
            self.order.age = 0
        for bucket in self.buckets.all:
            bucket.restart()

    def remove(self) -> None:
        """Wait for the pending reduction, and remove the hooks from the module."""
        try:
            if self._flags is not None:
                self._finish()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            reduced_in_backward.discard(self)
            if (module := self._module()) is not None and self in registered.get(module, []):
                registered[module].remove(self)

    def _on_gradient(self, parameter: Any) -> None:
        """Insert a complete gradient into its bucket, and launch the complete buckets. Autograd calls this hook."""
        if mpi_api.is_forked():
            stack()  # This raises NotStarted: the memory of the buckets belongs to the parent process.
        with self._lock:  # Autograd uses one thread per device, so hooks may run simultaneously.
            if self._pass_id != torch._C._current_graph_task_id():
                self._begin_pass()
            if self.num_passes + 1 < self.frequency:
                return
            if parameter.grad.requires_grad:
                raise RuntimeError(
                    f"the gradient of {self.names[parameter]} is part of a graph (create_graph=True), but a reduced "
                    "gradient has no graph; for second derivatives, use torch.autograd.grad(..., create_graph=True)"
                )
            index = self.buckets.index_of[parameter]
            self.buckets.all[index].insert(parameter)
            self._num_ready[index] += 1
            self._launch(only_ready=True)

    def _begin_pass(self) -> None:
        """Check a backward pass at its first complete gradient, and queue ``_end_pass`` for the end of the pass."""
        self._check_order()
        if (owner := self._owner()) is not None:
            owner.check_pass()
        self._check_parameters()
        wait_all(self._handles)  # Handles remain only if the last pass ended with an error.
        if self.num_passes + 1 == self.frequency:
            self._start_reduction()
        self._pass_id = torch._C._current_graph_task_id()
        end = functools.partial(self._end_pass)  # Autograd keeps this object until the pass ends or fails.
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _check_order(self) -> None:
        """Raise RuntimeError if this pass would add to gradients being reduced, or runs inside another pass."""
        is_part = self.frequency > 1 or self._flags is not None or self._end() is not None
        if is_part and _is_in_function_backward():
            raise RuntimeError(
                "a backward pass ran inside another backward pass, so incomplete gradients would be reduced; "
                "for activation checkpointing, use checkpoint(..., use_reentrant=False)"
            )
        if self._flags is not None:
            raise RuntimeError(AbsentGradient.why())

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the module's parameters have changed since the registration."""
        module = self._module()
        if module is None:
            return
        new = {p for p in self._parameters(module) if p not in self.names and p.requires_grad}
        if new and (unknown := new.difference(*[each.names for each in reduced_in_backward])):
            names = [name for name, p in module.named_parameters() if p in unknown] or ["parameters of other modules"]
            raise RuntimeError(
                f"{', '.join(names)}: added or made trainable after the registration, so their gradients stay local. "
                "Call remove() on the registration or optimizer (in an engine: end train()), and create a new one"
            )
        if not self.buckets.all_fit():
            raise RuntimeError(
                "parameters have changed their shape, dtype or device since the registration; call remove() on the "
                "registration or the optimizer, and create a new registration or optimizer"
            )

    def _end_pass(self) -> None:
        """Count a complete pass. After ``frequency`` passes, launch all reductions that are not launched yet."""
        self._pass_id = -1
        self.num_passes += 1
        if self.num_passes == self.frequency:
            self._end_reduction()
            if (owner := self._owner()) is not None:
                owner.wait_in_pass()

    def _start_reduction(self) -> None:
        """Reset the counters for a new reduction, without launching a bucket."""
        self._num_ready = [0] * len(self.buckets.all)  # number of complete gradients in each bucket
        self._num_launched = 0  # number of buckets launched, in their order
        self._handles = []
        self.order.begin()

    def _end_reduction(self) -> None:
        """Launch the remaining buckets, and the reduction of the flags."""
        flags = self.buckets.gradient_flags()  # Launching a bucket sets p.grad, so read the flags first.
        self._launch(only_ready=False)
        self.order.add()
        flags = self.order.append_numbers(flags, compares_steps=self.compares_steps and self.num_passes > 0)
        self._flags = verbs.allreduce_async(flags, op="max", comm=self.buckets.comm)

    def _launch(self, *, only_ready: bool) -> None:
        """Launch the next buckets in order; with ``only_ready``, stop at the first incomplete bucket."""
        # The order is fixed so that all ranks make the same calls, whichever gradient is complete first.
        for bucket in self.buckets.all[self._num_launched :]:
            if only_ready and self._num_ready[self._num_launched] < len(bucket.parameters):
                return
            self.order.add()
            self._handles += bucket.launch(self.op)
            self._num_launched += 1


registered: weakref.WeakKeyDictionary[torch.nn.Module, list[AsyncBackward]] = weakref.WeakKeyDictionary()
"""The registrations of each module. A registration stays active even if the caller keeps no reference to it."""


def register_async_backward(
    module: torch.nn.Module, *, frequency: int = 1, average: bool = True, compression: Compression | None = None
) -> AsyncBackward:
    """Reduce the gradients of a module while ``backward`` is still computing other gradients.

    Every ``frequency``-th backward pass launches one allreduce per bucket of gradients, as soon as the bucket is
    complete. A block of a BlockSequential is one bucket. The passes in between accumulate gradients. Call
    ``synchronize()`` on the returned object after each ``backward()``, before the optimizer's step. Before this call,
    reading or changing ``p.grad`` raises RuntimeError, even in hooks that are registered later.

    **Overwrites** ``p.grad``: it becomes a view of a flat buffer that the next reduction overwrites. Clone a gradient
    that you want to keep, save or send.

    Every rank must register the same module with the same arguments, and run the same number of backward passes. If one
    backward pass reaches several registrations, it must reach them in the same order on every rank. After you load an
    earlier state into the module and the optimizer, call ``restart()``. To stop the reductions, call ``remove()``.

    Args:
        module (torch.nn.Module): module whose trainable parameters are reduced over the ranks of the current level.
        frequency (int): number of backward passes per reduction; default 1.
        average (bool): True (default) divides the sum by the number of ranks; False keeps the sum.
        compression (Compression): compression of the gradients, such as ``optim.compression.BF16()``; default None.

    Returns:
        An ``AsyncBackward`` with ``synchronize()``, ``reduce_now()``, ``restart()`` and ``remove()``.

    Raises:
        TypeError: ``module`` is not a module, or ``compression`` is not a compression.
        ValueError: another registration already reduces one of the parameters, or ``frequency`` is below 1.
        RanksDisagree: on every rank, if the parameters differ between ranks in name, shape or dtype.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> registration = mpi.nn.register_async_backward(net)
        >>> net(torch.ones(2, 4) * mpi.rank()).sum().backward()
        >>> registration.synchronize()
        >>> bool((net.weight.grad == mpi.size() - 1).all())  # the mean of 2 * rank
        True
        >>> registration.remove()
    """
    make_buckets = functools.partial(buckets_of, compression=compression)
    return AsyncBackward(module, frequency=frequency, average=average, make_buckets=make_buckets)


def _remove_former() -> None:
    """Remove registrations from before ``mpi.stop()``, and registrations whose optimizer no longer exists."""
    if reduced_in_backward:
        gc.collect()  # Free dropped optimizers, which schedulers hold in cycles, at the same point on all ranks.
    for former in list(reduced_in_backward):
        if former.buckets.comm.is_free or former._owner() is None:
            former.remove()


def _while_alive(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls the method as long as the method's object exists.

    If the hook of a tensor held the method itself, the object and its module would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return call


def _is_in_function_backward() -> bool:
    """Return whether the current backward pass runs inside the ``backward`` of a ``torch.autograd.Function``."""
    return any(frame.f_code is _FUNCTION_BACKWARD for frame, _ in traceback.walk_stack(sys._getframe()))
