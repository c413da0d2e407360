"""What the ranks that train with one update have to agree on; found out when it is made, so that none waits in vain.

All functions that take ``comm`` are collective over it, and what they raise they raise on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import backoff, journal
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.errors import ParameterServerError, RanksDisagree

T = TypeVar("T")


def gathered(comm: Communicator, what: str, mine: T) -> list[T]:
    """What each rank gives, in rank order. The wait is watched, as ``what``, which is equal on all ranks."""
    return journal.run_together(what, comm, lambda: comm.direct.mpi.allgather(mine))


def wait_for_all(comm: Communicator, what: str) -> None:
    """Wait asleep until all ranks are here. The wait is watched, as ``what``, which is equal on all ranks."""
    journal.run_together(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def wait_for_all_after_training(comm: Communicator, what: str) -> None:
    """As ``meet``, for ranks that train asynchronously: one may wait long for others that are at work."""
    journal.run_while_others_work(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def check_alike(comm: Communicator, who: str, settings: Mapping[str, object]) -> None:
    """RanksDisagree unless all give the same."""
    given = gathered(comm, "settings of an update", dict(settings))
    for name in given[0]:
        by_rank = [told.get(name) for told in given]
        if any(value != by_rank[0] for value in by_rank):
            raise RanksDisagree(f"{who}: {name} by rank: {by_rank}; give the same on all ranks")


def check_trained(comm: Communicator, who: str, network: torch.nn.Module) -> None:
    """RanksDisagree unless all train parameters of the same names, shapes and dtypes, in the same order."""
    mine = [f"{name} {list(p.shape)} {p.dtype}" for name, p in network.named_parameters() if p.requires_grad]
    given = gathered(comm, "parameters of an update", mine)
    for rank, told in enumerate(given):
        if told != given[0]:
            at = next((i for i, pair in enumerate(zip(told, given[0], strict=False)) if pair[0] != pair[1]), None)
            at = min(len(told), len(given[0])) if at is None else at
            here, there = ("none" if at >= len(of) else of[at] for of in (told, given[0]))
            raise RanksDisagree(
                f"{who}: rank {rank} trains other parameters than rank 0: number {at} is {here}, and {there} on rank "
                "0; make the same network on all ranks, and freeze the same parameters"
            )


def check_within(group: Communicator | None, comm: Communicator, who: str) -> None:
    """ValueError unless the group of every rank of ``comm`` lies in it as a whole."""
    failure = None
    if group is not None:
        inner, outer = group.direct.mpi.Get_group(), comm.direct.mpi.Get_group()
        places = inner.Translate_ranks(None, outer)
        inner.Free()
        outer.Free()
        if any(place < 0 for place in places):
            failure = (
                f"{who}: a group of dataparallel_communicator has {group.size} ranks, not all of which are among the "
                f"{comm.size} over which the server is sharded; give a sharding_communicator whose groups hold whole "
                "workers"
            )
    raise_together(comm, failure)


def run_on_all_ranks(comm: Communicator, work: Callable[[], object]) -> None:
    """Do something; a ValueError on every rank if it is one on any. It is done on all when this returns."""
    failure = None
    try:
        work()
    except (TypeError, ValueError) as error:
        failure = str(error)
    raise_together(comm, failure)


def raise_together(comm: Communicator, failure: str | None) -> None:
    """ValueError with the first failure of any rank."""
    failures = gathered(comm, "outcomes of an update", failure)
    for rank, told in enumerate(failures):
        if told is not None:
            raise ValueError(f"{told} (rank {rank})")


def check_still_trained(who: str, step: int, network: torch.nn.Module, parameters: Sequence[Tensor]) -> None:
    """ParameterServerError unless the network trains exactly these parameters, in this order."""
    trained = [id(p) for p in network.parameters() if p.requires_grad]
    if trained != [id(p) for p in parameters]:
        raise ParameterServerError(
            f"update({step}): the network does not train the parameters any more with which this {who} was made "
            "(some were added, removed, replaced or frozen); free it, and make another"
        )
