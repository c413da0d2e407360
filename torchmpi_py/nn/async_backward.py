"""Gradients that are reduced while backward is still computing others.

A hook inserts a gradient into its bucket when autograd has accumulated it, and launches the buckets that are complete,
in their fixed order. The end of the backward pass launches the others, with zeros for parameters without a gradient.
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

_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__  # autograd calls Function.backward here


class AsyncBackward:
    """Reduces the gradients of a module during ``backward``; made by ``register_async_backward``.

    Call ``synchronize()`` after each ``backward()`` and before reading gradients. A second backward pass before it
    would add to gradients that are being reduced, and raises RuntimeError; to accumulate, use ``frequency``. Every
    rank's loss has to reach at least one parameter. Activation checkpointing works with ``use_reentrant=False``; with
    True a backward pass consists of several, and raises RuntimeError unless one of them reaches all the parameters.

    Args, in addition to the arguments of ``register_async_backward``:
        comm: the ranks to average over; default: the current level.
        parameters: which parameters of the module to reduce; called with it, here and in each pass.
        make_buckets: creates the buckets of these parameters; called with module, parameters and ``comm``.
        owner: an optimizer. Its ``check_pass`` is called when the first gradient of a backward pass is complete, its
            ``wait_in_pass`` at the end of a pass whose gradients are reduced.
    """

    compares_steps = True
    """Whether the ranks compare how often they have updated their parameters since the last reduction."""

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
        self.num_passes = 0  # complete ones since the last reduction
        self._pass_id = -1  # autograd's number for the backward pass under way
        self._end: Callable[[], object | None] = lambda: None  # its callback, as long as that pass is under way
        self.order = LaunchOrder(self.buckets.comm)
        self._handles: list[Handle[Any]]  # of the launched reductions
        self._start_reduction()
        self._flags: Handle[Tensor] | None = None  # of the gradients; from the end of a pass to synchronize
        self._module = weakref.ref(module)
        hook = _while_alive(self._on_gradient)
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(hook) for p in self.names]  # type: ignore[no-untyped-call]
        registered.setdefault(module, []).append(self)
        reduced_in_backward.add(self)

    def check_pass(self) -> None:
        """Do nothing: a registration that is its own owner."""

    wait_in_pass = check_pass

    def synchronize(self) -> None:
        """Wait until the gradients of the last backward pass are reduced. Collective.

        Does nothing after a pass that only accumulates. A parameter that got no gradient on any rank keeps None, or
        gets what compression has kept of earlier ones.
        RuntimeError where the pass was of parameters that have become trainable since the registration.
        """
        if self._flags is not None:
            self._finish()
        elif self._hooks:
            self._check_parameters()  # no pass has, which reached none of those that are registered

    def _finish(self) -> None:
        """Wait for the reduction that is under way."""
        assert self._flags is not None
        flags = self._flags
        handles, is_late = [*self._handles, flags], False
        try:
            wait_all(handles)
        except BaseException as error:  # of an operation; or of a deadline, or a signal's handler: the next waits again
            is_late = all(error is not each._error for each in handles)
            raise
        finally:
            if not is_late:
                self.num_passes, self._num_launched, self._handles, self._flags = 0, 0, [], None
        self.buckets.finish(self.op, self.order.checked(flags.wait()))

    def reduce_now(self) -> None:
        """Reduce the gradients as they are, after no backward pass or fewer than ``frequency``. Collective.

        The call takes part in the reduction that a backward pass of another rank has begun.
        """
        self._check_parameters()
        if self._flags is None:  # else the wait for a reduction was interrupted
            self._start_reduction()
            self._end_reduction()
        self._finish()

    def restart(self) -> None:
        """Begin a new step, as after an earlier state was loaded into module and optimizer. Every rank calls it.

        Drops the gradients, and what compression has kept of earlier steps.
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
        """Wait for the reductions under way, and remove the hooks from the module."""
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
        """Insert a complete gradient into its bucket, and launch the buckets that are complete. The hook."""
        if mpi_api.is_forked():
            stack()  # NotStarted: the bucket is the parent's
        with self._lock:  # autograd has a thread per device
            if self._pass_id != torch._C._current_graph_task_id():
                self._begin_pass()
            if self.num_passes + 1 < self.frequency:
                return
            if parameter.grad.requires_grad:
                raise RuntimeError(
                    f"the gradient of {self.names[parameter]} is part of a graph (create_graph=True), which none has "
                    "after a reduction: take torch.autograd.grad(..., create_graph=True), and backward() without it"
                )
            index = self.buckets.index_of[parameter]
            self.buckets.all[index].insert(parameter)
            self._num_ready[index] += 1
            self._launch(only_ready=True)

    def _begin_pass(self) -> None:
        """Check a backward pass at its first complete gradient, and have autograd call ``_end_pass``."""
        self._check_order()
        if (owner := self._owner()) is not None:
            owner.check_pass()
        self._check_parameters()
        wait_all(self._handles)  # none, unless the last pass broke off
        if self.num_passes + 1 == self.frequency:
            self._start_reduction()
        self._pass_id = torch._C._current_graph_task_id()
        end = functools.partial(self._end_pass)  # autograd has it until the pass ends or breaks off
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _check_order(self) -> None:
        """RuntimeError if this pass would add to gradients that are being reduced, or is one part of a pass."""
        is_part = self.frequency > 1 or self._flags is not None or self._end() is not None
        if is_part and _is_in_function_backward():
            raise RuntimeError(
                "a backward pass ran inside another one, so that gradients would be reduced before all of their parts "
                "are there: for activation checkpointing use checkpoint(..., use_reentrant=False)"
            )
        if self._flags is not None:
            raise RuntimeError(AbsentGradient.why())

    def _check_parameters(self) -> None:
        """RuntimeError if the module has other parameters than at its registration."""
        module = self._module()
        if module is None:
            return
        new = {p for p in self._parameters(module) if p not in self.names and p.requires_grad}
        if new and (unknown := new.difference(*[each.names for each in reduced_in_backward])):
            names = [name for name, p in module.named_parameters() if p in unknown] or ["parameters of other modules"]
            raise RuntimeError(
                f"{', '.join(names)}: new or trainable only since the registration, so that no gradient of it is "
                "averaged; remove() the registration or optimizer, or end train() of the engine, and make another one"
            )
        if not self.buckets.all_fit():
            raise RuntimeError(
                "parameters have another shape, dtype or device than at their registration; remove() the "
                "registration, or the optimizer that averages, and make another one"
            )

    def _end_pass(self) -> None:
        """Launch the remaining buckets and the reduction of the flags: all gradients of a pass are complete."""
        self._pass_id = -1
        self.num_passes += 1
        if self.num_passes == self.frequency:
            self._end_reduction()
            if (owner := self._owner()) is not None:
                owner.wait_in_pass()

    def _start_reduction(self) -> None:
        """Begin a reduction; nothing is launched yet."""
        self._num_ready = [0] * len(self.buckets.all)  # complete gradients of each bucket
        self._num_launched = 0  # buckets, in their order
        self._handles = []
        self.order.begin()

    def _end_reduction(self) -> None:
        """Launch the buckets that are not launched yet, and the reduction of the flags."""
        flags = self.buckets.gradient_flags()  # before the buckets give every parameter a gradient
        self._launch(only_ready=False)
        self.order.add()
        flags = self.order.append_numbers(flags, compares_steps=self.compares_steps and self.num_passes > 0)
        self._flags = verbs.allreduce_async(flags, op="max", comm=self.buckets.comm)

    def _launch(self, *, only_ready: bool) -> None:
        """Launch the next buckets, in order; with ``only_ready`` up to the first incomplete one."""
        # The order is fixed, so that all ranks make the same calls, whichever gradient is complete first.
        for bucket in self.buckets.all[self._num_launched :]:
            if only_ready and self._num_ready[self._num_launched] < len(bucket.parameters):
                return
            self.order.add()
            self._handles += bucket.launch(self.op)
            self._num_launched += 1


registered: weakref.WeakKeyDictionary[torch.nn.Module, list[AsyncBackward]] = weakref.WeakKeyDictionary()
"""Keeps the registrations of each module: if the caller drops one, or its DistributedOptimizer, later passes raise."""


def register_async_backward(
    module: torch.nn.Module, *, frequency: int = 1, average: bool = True, compression: Compression | None = None
) -> AsyncBackward:
    """Reduce gradients while ``backward`` is still computing others.

    Every ``frequency``-th backward pass launches the allreduce of each bucket of gradients (each block, in a
    BlockSequential) when its gradients are complete; the passes between accumulate. ``p.grad`` becomes a view of a flat
    buffer that the next reduction overwrites: clone what you want to keep, save or send. Call ``synchronize()`` on the
    result after each ``backward()``, before the optimizer; until then reading or changing ``p.grad`` raises
    RuntimeError, in hooks that are registered later too. ``remove()`` ends it. Every rank registers the same module
    and runs the same number of backward passes; one that reaches several registrations reaches them in the same order.
    ``compression``: of what travels, as ``optim.compression.BF16()``. After loading an earlier state of module and
    optimizer call ``restart()``. ValueError for parameters that are registered
    already, with this module or another; RanksDisagree, from ``synchronize``, where that order differs between ranks.
    """
    make_buckets = functools.partial(buckets_of, compression=compression)
    return AsyncBackward(module, frequency=frequency, average=average, make_buckets=make_buckets)


def _remove_former() -> None:
    """Remove registrations that the program can no longer end: mpi.stop() was called, or their optimizer is gone."""
    if reduced_in_backward:
        gc.collect()  # a scheduler and its optimizer refer to each other; on all ranks the same optimizers are gone
    for former in list(reduced_in_backward):
        if former.buckets.comm.is_free or former._owner() is None:
            former.remove()


def _while_alive(method: Callable[..., object]) -> Callable[..., None]:
    """A function that calls the method as long as its object lives.

    Hooks of tensors would keep the object and with it the module alive for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return call


def _is_in_function_backward() -> bool:
    """Whether a ``torch.autograd.Function`` runs the backward pass under way, in the backward pass of its own."""
    return any(frame.f_code is _FUNCTION_BACKWARD for frame, _ in traceback.walk_stack(sys._getframe()))
