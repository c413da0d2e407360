"""A small explicit-state model checker: processes that read and write cells, meet in barriers, and wait for each other.

A *process* is a list of steps; a *cell* holds a number: the name of the last write to it, 0 before the first. A read
names the write that it has to see. ``explore`` visits every state that any interleaving reaches, breadth first, until
a read sees another write (*violation*), or nobody can go on though somebody is not through (*stuck*).

Orderings tell which step of a process may be carried out before an earlier one of its own:

PROGRAM   none: sequential consistency
TSO       a read before an earlier write of another cell: x86's store buffer
WEAK      any two that share no cell: more than ARM allows, which keeps data and address dependencies

No step passes a fence. A barrier orders the memory: steps before it are done before it, and steps after it after.

``reduced``: where a step commutes with all that the other processes may do before that step is carried out, it is the
only one taken from this state (a persistent set of one; the steps of a process come to an end, so none is put off for
ever). What others may do ends where they have to wait for the process in question: at a barrier, or for a number that
it has yet to write. Barriers commute with everything, and so do waits, for what is waited for only grows. That leaves
out interleavings, but no violation and no stuck state.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

PROGRAM, TSO, WEAK = "program order", "total store order", "weak order"
Cell = Hashable


@dataclasses.dataclass(frozen=True)
class Step:
    """One atomic step. Reads come before writes."""

    name: str
    reads: tuple[tuple[Cell, int], ...] = ()  # with what has to be seen
    writes: tuple[tuple[Cell, int], ...] = ()
    barrier: Hashable = None  # the group that meets
    is_fence: bool = False
    after: tuple[int, int] | None = None  # not before this process has done so many steps
    until: tuple[Cell, int] | None = None  # not before the cell is at least this
    awaits: tuple[tuple, Cell] | None = None  # (begin, cell): the same of the cell (*begin, value of that cell), and 1
    copies: tuple[Cell, Cell] | None = None  # the first becomes what the second is
    looks: tuple[Cell, Callable[[int], bool]] | None = None  # the process ends here, and has found what it looks for


class Found(NamedTuple):
    """What an exploration came to."""

    num_states: int
    problem: str  # empty if there is none
    trail: list[str]
    endings: set[tuple[bool, ...]]  # which processes ended by what they saw, in the last states


class _Compiled(NamedTuple):
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    before: int  # earlier steps of this process that have to be done
    conflicts: tuple[int, ...]  # by process: the steps that do not commute with this one


def explore(
    processes: Sequence[Sequence[Step]], ordering: str = PROGRAM, *, reduced: bool = False, hunt: bool = False
) -> Found:
    """Every state. To ``hunt`` is to go depth first: what is wrong is found sooner, by a longer way."""
    return _Exploration(processes, ordering, reduced).run(hunt)


class _Exploration:
    def __init__(self, processes, ordering, reduced):
        self.processes, self.reduced = processes, reduced
        self.index: dict[Cell, int] = {}
        for steps in processes:
            for step in steps:
                for cell in _cells(step):
                    self.index.setdefault(cell, len(self.index))
        self.full = [(1 << len(steps)) - 1 for steps in processes]
        self.barriers: dict[Hashable, dict[int, int]] = {}  # group -> process -> its steps that are barriers of it
        for p, steps in enumerate(processes):
            for j, step in enumerate(steps):
                if step.barrier is not None:
                    masks = self.barriers.setdefault(step.barrier, {})
                    masks[p] = masks.get(p, 0) | 1 << j
        self.readers, self.writers = self._users(_read), self._users(_written)
        self.values: dict[Cell, list[tuple[int, int, int]]] = {}  # process, step, value of each write
        for p, steps in enumerate(processes):
            for j, step in enumerate(steps):
                for cell, value in step.writes:
                    self.values.setdefault(cell, []).append((p, j, value))
        self.waits = [
            sum(1 << j for j, step in enumerate(steps) if _is_wait(step)) if ordering == PROGRAM else 0
            for steps in processes
        ]
        everyone = range(len(processes))  # for processes p, q: the barriers at which q waits for p
        self.bounds = [
            [sum(masks[q] for masks in self.barriers.values() if p in masks and q in masks) for q in everyone]
            for p in everyone
        ]
        self.steps = [
            [self._compile(p, j, step, ordering) for j, step in enumerate(steps)] for p, steps in enumerate(processes)
        ]

    def _users(self, of_step):
        """cell -> process -> the steps that read it, or that write it."""
        users: dict[Cell, list[int]] = {}
        for p, steps in enumerate(self.processes):
            for j, step in enumerate(steps):
                for cell in () if _is_wait(step) else of_step(step):  # it does not matter when a wait ends
                    users.setdefault(cell, [0] * len(self.processes))[p] |= 1 << j
        return users

    def _compile(self, p, j, step, ordering):
        earlier = self.processes[p][:j]
        before = (1 << j) - 1
        if ordering != PROGRAM:
            before = sum(1 << i for i, other in enumerate(earlier) if not _may_pass(step, other, ordering))
        met = [self.writers[cell] for cell in _cells(step) if cell in self.writers]
        met += [self.readers[cell] for cell in _written(step) if cell in self.readers]
        conflicts = [0] * len(self.processes)
        for masks in () if _is_wait(step) else met:
            conflicts = [a | b for a, b in zip(conflicts, masks, strict=True)]
        conflicts[p] = 0
        index = self.index
        reads = tuple((index[cell], value) for cell, value in step.reads)
        return _Compiled(reads, tuple((index[cell], value) for cell, value in step.writes), before, tuple(conflicts))

    def _awaited(self, step, cells):
        """(cell that a step waits for, what it has to be at least); None where it waits no longer, or for nothing."""
        if step.until is not None:
            cell, least = step.until
        elif step.awaits is not None:
            value, least = cells[self.index[step.awaits[1]]], 1
            cell = (*step.awaits[0], value)
            if not value:
                return None
        else:
            return None
        return None if cells[self.index[cell]] >= least else (cell, least)

    def _blocked(self, state, p, j, q):
        """The first wait of q, as a bit, that ends after step j of p."""
        left = self.waits[q] & ~state[0][q]
        while left:
            bit = left & -left
            left ^= bit
            awaited = self._awaited(self.processes[q][bit.bit_length() - 1], state[1])
            if awaited is not None:
                cell, least = awaited
                ends = [(by, k) for by, k, value in self.values.get(cell, ()) if value >= least]
                if ends and all(by == p and k > j for by, k in ends):
                    return bit
        return 0

    def run(self, hunt: bool) -> Found:
        first = (0,) * len(self.processes), (0,) * len(self.index), 0
        self.parents = {first: None}
        self.endings: set[tuple[bool, ...]] = set()
        queue = deque([first])
        while queue:
            state = queue.pop() if hunt else queue.popleft()
            successors, problem = self._successors(state)
            if problem:
                return Found(len(self.parents), problem, self._trail(state), self.endings)
            for successor, name in successors:
                if successor not in self.parents:
                    self.parents[successor] = state, name
                    queue.append(successor)
        return Found(len(self.parents), "", [], self.endings)

    def _successors(self, state):
        """(the next states with the names of the steps that lead there, the problem)."""
        done, _, found = state
        meetings = self._meetings(done)
        moves = [(p, j) for p in range(len(done)) for j in self._enabled(state, p)]
        if self.reduced:
            if meetings:
                return [self._meet(state, meetings[0])], ""
            moves = next(([move] for move in moves if self._commutes(state, *move)), moves)
        successors = [self._meet(state, meeting) for meeting in meetings]
        for p, j in moves:
            successor, problem = self._carry_out(state, p, j)
            if problem:
                return [], problem
            successors.append((successor, f"{p}: {self.processes[p][j].name}"))
        if not successors:
            self.endings.add(tuple(bool(found >> p & 1) for p in range(len(done))))
            if not found and list(done) != self.full:
                return [], "stuck: " + "; ".join(self._next(p, mask) for p, mask in enumerate(done))
        return successors, ""

    def _next(self, p, mask):
        steps = [step.name for j, step in enumerate(self.processes[p]) if not mask >> j & 1]
        return f"{p} at {steps[0]}" if steps else f"{p} is through"

    def _enabled(self, state, p):
        done, cells, _ = state
        mask, steps = done[p], self.processes[p]
        j = (~mask & mask + 1).bit_length() - 1  # the first that is not done
        first = j
        while j < len(steps):
            step, compiled = steps[j], self.steps[p][j]
            if not mask >> j & 1 and not compiled.before & ~mask:
                if step.barrier is None and self._is_open(step, done, cells):
                    yield j
            elif compiled.before == (1 << j) - 1 and j > first:
                return  # nothing passes this one
            j += 1

    def _is_open(self, step, done, cells):
        if step.after is not None:
            q, count = step.after
            if ~done[q] & (1 << count) - 1:
                return False
        return self._awaited(step, cells) is None

    def _meetings(self, done):
        """The barriers at which all of a group are: (process, step) of each."""
        found = []
        for masks in self.barriers.values():
            meeting = []
            for p, mask in masks.items():
                left = mask & ~done[p]
                j = (left & -left).bit_length() - 1
                if not left or self.steps[p][j].before & ~done[p]:
                    break
                meeting.append((p, j))
            else:
                found.append(meeting)
        return found

    def _meet(self, state, meeting):
        done, cells, found = list(state[0]), state[1], state[2]
        for p, j in meeting:
            done[p] |= 1 << j
        p, j = meeting[0]
        return (tuple(done), cells, found), f"all: {self.processes[p][j].name}"

    def _commutes(self, state, p, j):
        """With all that others may do before that step is done."""
        done = state[0]
        for q, conflicts in enumerate(self.steps[p][j].conflicts):
            if conflicts:
                ahead = self.bounds[p][q] & ~done[q] | self._blocked(state, p, j, q)
                reach = (ahead & -ahead) - 1 if ahead else -1  # up to the barrier that needs p
                if conflicts & ~done[q] & reach:
                    return False
        return True

    def _carry_out(self, state, p, j):
        done, cells, found = state
        step, compiled = self.processes[p][j], self.steps[p][j]
        for cell, expected in compiled.reads:
            if cells[cell] != expected:
                return None, f"{p}: {step.name} sees write {cells[cell]} instead of {expected}"
        mask = done[p] | 1 << j
        if step.looks is not None and step.looks[1](cells[self.index[step.looks[0]]]):
            mask, found = self.full[p], found | 1 << p
        if compiled.writes or step.copies:
            changed = list(cells)
            for cell, value in compiled.writes:
                changed[cell] = value
            if step.copies:
                changed[self.index[step.copies[0]]] = cells[self.index[step.copies[1]]]
            cells = tuple(changed)
        return ((*done[:p], mask, *done[p + 1 :]), cells, found), ""

    def _trail(self, state):
        names = []
        while self.parents[state] is not None:
            state, name = self.parents[state]
            names.append(name)
        return names[::-1]


def _is_wait(step: Step) -> bool:
    return step.until is not None or step.awaits is not None


def _read(step: Step) -> set[Cell]:
    cells = {cell for cell, _ in step.reads}
    cells |= {step.until[0]} if step.until else set()
    cells |= {step.awaits[1]} if step.awaits else set()
    cells |= {step.copies[1]} if step.copies else set()
    return cells | ({step.looks[0]} if step.looks else set())


def _written(step: Step) -> set[Cell]:
    return {cell for cell, _ in step.writes} | ({step.copies[0]} if step.copies else set())


def _cells(step: Step) -> set[Cell]:
    return _read(step) | _written(step)


def _may_pass(later: Step, earlier: Step, ordering: str) -> bool:
    """Whether a step may be carried out before an earlier one of the same process."""
    if ordering == PROGRAM or _cells(later) & _cells(earlier):
        return False
    if any(step.is_fence or step.barrier is not None for step in (later, earlier)):
        return False
    return ordering == WEAK or not (_written(later) or _read(earlier))


def without_barrier(processes: Sequence[Sequence[Step]], group: Hashable, number: int) -> list[list[Step]]:
    """The same without the barrier with this number, from 0, of a group."""
    return [without([step.barrier == group for step in steps], steps, number) for steps in processes]


def without(chosen: Sequence[bool], steps: Sequence[Step], number: int) -> list[Step]:
    """All steps but that with this number among the chosen ones, which is left empty: numbers of steps stay."""
    which = [j for j, is_chosen in enumerate(chosen) if is_chosen][number : number + 1]
    return [Step(f"(no {s.name})", after=s.after) if j in which else s for j, s in enumerate(steps)]


def with_plain_barriers(processes: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """Barriers made of plain words: each process counts in its own, and waits for those of the others."""
    members = {step.barrier: [] for steps in processes for step in steps if step.barrier is not None}
    for group, ranks in members.items():
        ranks += [p for p, steps in enumerate(processes) if any(step.barrier == group for step in steps)]
    made = []
    for p, steps in enumerate(processes):
        out, counts = [], dict.fromkeys(members, 0)
        for step in steps:
            group = step.barrier
            if group is None:
                out.append(step)
                continue
            counts[group] += 1
            out.append(Step(f"{step.name}: here", writes=(((group, p), counts[group]),)))
            out += [
                Step(f"{step.name}: wait for {q}", until=((group, q), counts[group])) for q in members[group] if q != p
            ]
        made.append(out)
    return made
