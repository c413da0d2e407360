"""Extensions: objects that take part in a training run and keep their own state, such as ``Checkpoint``.

The loop calls the user's hooks first, then the extensions in their order. The list of calls at each moment is composed
once per run, so a moment without calls costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torchmpi_py.engine.state import MOMENTS, Hook, Hooks, State, nothing


class Stateful(Protocol):
    """An object with a state, such as a scheduler or a meter (the term of torch.distributed.checkpoint)."""

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that ``state_dict`` has returned."""


class Extension:
    """Base class of extensions, which take part in ``engine.train(..., extensions=[...])``.

    A subclass defines the moments that it needs, as methods with the names of the hooks: on_start, on_start_epoch,
    on_sample, on_forward, on_forward_criterion, on_backward, on_update, on_end_epoch, on_end, on_recovery. Each method
    gets the ``State``. In a step in which this rank has no samples, only on_backward and on_update are called, and
    ``state.sample`` is None.

    Raises:
        TypeError: when a subclass is defined, for any other name that begins with ``on_``.

    Examples:
        >>> class StopAtNaN(mpi.engine.Extension):
        ...     def on_update(self, state):
        ...         if state.sample is not None and state.loss.isnan():
        ...             raise ValueError(f"the loss is not a number after step {state.t}")
    """

    serves_tests = False
    """Whether ``engine.test(extensions=...)`` takes the extension."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name.startswith("on_") and name not in MOMENTS:
                raise TypeError(f"{cls.__name__}.{name} is not a hook; define one of {', '.join(MOMENTS)}")

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[Any]:
        """Return the context of the run of ``engine``, from before ``on_start`` to after ``on_end``.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.

        Returns:
            A context manager; by default an empty one.
        """
        return nullcontext()

    def around_epoch(self, state: State) -> AbstractContextManager[Any]:
        """Return the context of an epoch, or of the rest of one. If it suppresses an error, the loop continues.

        Args:
            state (State): state of the run.

        Returns:
            A context manager; by default an empty one.
        """
        return nullcontext()


@contextmanager
def within(brackets: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter the contexts in their order. If one of them suppresses an error, the block ends without an error."""
    with ExitStack() as stack:
        for each in brackets:
            stack.enter_context(each)
        yield


@contextmanager
def called(hooks: Hooks, extensions: Sequence[Extension]) -> Iterator[Hooks]:
    """Yield hooks that call the user's hook and then the same method of each extension.

    A hook that the user sets later is called too.
    """
    for each in extensions:
        if not isinstance(each, Extension):
            raise TypeError(
                f"extensions: expected objects of engine.Extension, found {each!r}; derive its class from Extension"
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
        return calls[0] if calls else id  # A call of a builtin is the cheapest call.

    def all_of_them(state: State) -> None:
        for call in calls:
            call(state)

    return all_of_them
