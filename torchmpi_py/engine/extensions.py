"""Extensions: objects that take part in a training run and keep their own state, such as ``Checkpoint``.

The loop calls the user's hooks first, then the extensions in their order. What is called at a moment is composed once a
run, so a moment at which nothing happens costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torchmpi_py.engine.state import MOMENTS, Hook, Hooks, State, nothing


class Stateful(Protocol):
    """An object with a state: a schedule of the learning rate, a meter (torch.distributed.checkpoint's word)."""

    def state_dict(self) -> Any:
        """The state, as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state that ``state_dict`` gave."""


class Extension:
    """Take part in ``engine.train(..., extensions=[...])``: the base class of extensions.

    A subclass defines the moments that it needs, as methods with the names of the hooks: on_start, on_start_epoch,
    on_sample, on_forward, on_forward_criterion, on_backward, on_update, on_end_epoch, on_end, on_recovery. Each gets
    the ``State``. In a step in which this rank has no samples only on_backward and on_update are called, and
    ``state.sample`` is None. TypeError, when the class is made, for another name that begins with ``on_``.

    Example:
        >>> class StopAtNaN(Extension):
        ...     def on_update(self, state):
        ...         if state.sample is not None and state.loss.isnan():
        ...             raise ValueError(f"the loss is not a number after step {state.t}")
    """

    serves_tests = False
    """Whether ``engine.test(extensions=...)`` takes the extension."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name.startswith("on_") and name not in MOMENTS:
                raise TypeError(f"{cls.__name__}.{name}: there is no such moment; there are {', '.join(MOMENTS)}")

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[Any]:
        """Return the bracket around the run of ``engine``, from before ``on_start`` to after ``on_end``."""
        return nullcontext()

    def around_epoch(self, state: State) -> AbstractContextManager[Any]:
        """Return the bracket around an epoch, or the rest of one; if it swallows an error, the loop goes on."""
        return nullcontext()


@contextmanager
def within(brackets: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter the brackets in their order; the block ends quietly where one of them swallows an error."""
    with ExitStack() as stack:
        for each in brackets:
            stack.enter_context(each)
        yield


@contextmanager
def called(hooks: Hooks, extensions: Sequence[Extension]) -> Iterator[Hooks]:
    """What a run calls at each moment: the user's hook, also one that is set meanwhile, and the extensions' methods."""
    for each in extensions:
        if not isinstance(each, Extension):
            raise TypeError(
                f"extensions: expected objects of engine.Extension, found {each!r}; derive its class from it"
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
        return calls[0] if calls else id  # a call of a builtin, the cheapest one

    def all_of_them(state: State) -> None:
        for call in calls:
            call(state)

    return all_of_them
