"""A storm on the ranks of this job: rounds of programs drawn from a seed, until time is over or a result is wrong."""

import argparse
import contextlib
import os
import random
import sys
import threading
import time
import traceback

import pytest
import storm_actors
import storm_delays
import storm_faults
import torch
import torch.distributed as dist
from storm_draw import groups, program

import torchmpi_py as mpi
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.watch import abort


class Storm:
    """The groups, and what came of the rounds so far. Collective."""

    def __init__(self, seed, has_fault=False):
        self.seed = seed
        self.is_chatty = False
        self.num_operations = self.num_rounds = 0
        self.patch = pytest.MonkeyPatch()
        for name in ("staged", "cudaipc"):  # on the host
            self.patch.setattr(BY_NAME[name], "devices", frozenset({"cpu", "cuda"}))
        storm_delays.inject(self.patch, f"{seed} rank {mpi.rank()}")
        if random.Random(f"{seed} ways").random() < 0.7:
            storm_delays.alternate(self.patch)
        if has_fault:
            storm_faults.one_arena(self.patch, mpi)
        self.control = mpi.split(0)
        self.groups = self._make_groups()

    def _make_groups(self):
        me, world = mpi.rank(), mpi.communicator(0)
        in_mpi, in_dist = groups(self.seed, mpi.size())
        level = mpi.push_communicator(me % 2)
        mpi.set_collective_span(0, level)
        made = {"mpi": {0: storm_actors.Group(mpi, world, world)}, "dist": {}}
        for index, ranks in enumerate(in_mpi[1:], 1):
            comm = mpi.split(0 if me in ranks else None)
            if comm:
                made["mpi"][index] = storm_actors.Group(mpi, comm, comm)
        for index, ranks in enumerate(in_dist):
            pg = dist.new_group(ranks)
            if me in ranks:
                made["dist"][index] = storm_actors.Group(mpi, pg, pg.comm)
        return made

    def round(self, number, keep=None):
        """Carry out a round, or what to ``keep`` of it; what is wrong, on any rank. Collective."""
        actors = program(self.seed, number, mpi.size())
        if keep is not None:
            actors = reduced(actors, keep)
        if self.is_chatty:
            print(f"storm: round {number}", flush=True)
        wrong = []
        threads = [
            threading.Thread(target=_guarded, args=(each, self.groups, wrong), name=f"storm-{index}")
            for index, each in enumerate(actors)
            if each.kind not in ("async", "engine")
        ]
        for thread in threads:
            thread.start()
        for each in actors:
            if each.kind in ("async", "engine"):
                _guarded(each, self.groups, wrong)
        for thread in threads:
            thread.join()
        self.num_operations += storm_actors.operations(actors)
        self.num_rounds += 1
        return [told for each in mpi.allgather_object(wrong, comm=self.control) for told in each]

    def run(self, seconds, first=0):
        """Rounds until the time is over; (number, what is wrong) of the first that fails, or None."""
        begin = time.monotonic()
        number = first
        while mpi.broadcast(int(time.monotonic() - begin < seconds), comm=self.control):
            wrong = self.round(number)
            if wrong:
                return number, wrong
            number += 1
        return None

    def close(self):
        """Take back what was patched."""
        mpi.set_collective_span(0, 0)
        self.patch.undo()


def reduced(actors, keep):
    """``keep``: for each actor that stays, its index and the places of its steps, as in "0:1,4;2:0"."""
    chosen = []
    for part in keep.split(";"):
        index, _, places = part.partition(":")
        actor = actors[int(index)]
        actor.steps = [actor.steps[int(place)] for place in places.split(",")]
        actor.steps[-1].waits = True
        chosen.append(actor)
    return chosen


def _guarded(actor, of_groups, wrong):
    """An error would leave the other ranks waiting: it ends the job."""
    torch.set_num_threads(1)
    try:
        storm_actors.run(actor, of_groups, mpi, wrong)
    except BaseException:
        told = f"storm: {actor.kind} on rank {mpi.communicator(0).rank} failed\n{traceback.format_exc()}"
        os.write(2, told.encode())  # pytest keeps what goes to sys.stderr
        abort.abort(3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="1")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--round", type=int)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep")
    parser.add_argument("--fault", action="store_true")
    options = parser.parse_args()
    mpi.start()
    dist.init_process_group("torchmpi")
    storm = Storm(options.seed, options.fault)
    storm.is_chatty = mpi.rank() == 0
    begin, found = time.monotonic(), None
    if options.round is None:
        found = storm.run(options.seconds)
    else:
        for _ in range(options.repeat):
            wrong = storm.round(options.round, options.keep)
            if wrong:
                found = options.round, wrong
                break
    seconds = time.monotonic() - begin
    if mpi.rank() == 0:
        said = f"seed {options.seed}, {mpi.size()} ranks, {storm.num_operations} operations"
        print(f"storm: {said} in {storm.num_rounds} rounds, {seconds:.1f} s: {'WRONG' if found else '0 wrong'}")
        if found:
            print(f"storm: round {found[0]}: {len(found[1])} results are wrong", *found[1][:5], sep="\n    ")
        sys.stdout.flush()
    if found:
        with contextlib.suppress(BaseException):
            storm.control.direct.mpi.Barrier()
        abort.abort(1)  # the state of the process is not to be trusted
    storm.close()
    dist.destroy_process_group()
    mpi.stop()


if __name__ == "__main__":
    main()
