"""Extensions: objects that add behaviour to a training run and have their own state, such as ``Checkpoint``.

At each hook, the loop calls the user's function first, and then the extensions in the order of their list. These calls
are combined into one function when the run begins, so a hook without functions costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torchmpi_py.engine.state import MOMENTS, Hook, Hooks, State, nothing


class Stateful(Protocol):
    """Protocol of objects with a state, such as schedulers and meters.

    The name comes from torch.distributed.checkpoint.
    """

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that ``state_dict`` has returned."""


class Extension:
    """Base class of extensions for ``engine.train(..., extensions=[...])``.

    A subclass defines methods with the names of the hooks that it needs: on_start, on_start_epoch, on_sample,
    on_forward, on_forward_criterion, on_backward, on_update, on_end_epoch, on_end, on_recovery. Each method receives
    the ``State``. If this rank has no samples in a step, only on_backward and on_update are called, and
    ``state.sample`` is None.

    Raises:
        TypeError: a subclass defines a method whose name begins with ``on_`` but is not the name of a hook.

    Examples:
        >>> class StopAtNaN(mpi.engine.Extension):
        ...     def on_update(self, state):
        ...         if state.sample is not None and state.loss.isnan():
        ...             raise ValueError(f"the loss is not a number after step {state.t}")
    """

    serves_tests = False
    """Whether ``engine.test(extensions=...)`` accepts the extension."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name.startswith("on_") and name not in MOMENTS:
                raise TypeError(f"{cls.__name__}.{name} is not a hook; define one of {', '.join(MOMENTS)}")

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[Any]:
        """Return the context of a run, which begins before ``on_start`` and ends after ``on_end``.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.

        Returns:
            A context manager; the default one does nothing.
        """
        return nullcontext()

    def around_epoch(self, state: State) -> AbstractContextManager[Any]:
        """Return the context of an epoch, or of the rest of a resumed epoch.

        If the context suppresses an error, the loop continues.

        Args:
            state (State): state of the run.

        Returns:
            A context manager; the default one does nothing.
        """
        return nullcontext()


@contextmanager
def within(brackets: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Run the block within these contexts, entered in order. A context may suppress an error of the block."""
    with ExitStack() as stack:
        for each in brackets:
            stack.enter_context(each)
        yield


@contextmanager
def called(hooks: Hooks, extensions: Sequence[Extension]) -> Iterator[Hooks]:
    """Yield hooks that call the user's hook and then the same method of each extension.

    Hooks that the user sets within the block are called too.
    """
    for each in extensions:
        if not isinstance(each, Extension):
            raise TypeError(
                f"extensions: {each!r} is not an engine.Extension; pass an object of a class derived from Extension"
            )
    calls = Hooks()

    def compose(moment: str) -> None:
        every = [getattr(hooks, moment), *(getattr(each, moment, nothing) for each in extensions)]
        setattr(calls, moment, _one_after_the_other([call for call in every if call is not nothing]))

    for moment in MOMENTS:
        compose(moment)
    hooks.__dict__["followers"].append(compose)
    try:
        yield calls
    finally:
        hooks.__dict__["followers"].remove(compose)


def _one_after_the_other(calls: list[Hook]) -> Hook:
    if len(calls) < 2:
        return calls[0] if calls else id  # Without functions, use a builtin: its call is the fastest.

    def all_of_them(state: State) -> None:
        for call in calls:
            call(state)

    return all_of_them
