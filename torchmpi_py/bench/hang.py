"""The command ``hang``: an explanation of the dumps of a job that hung (``watch/flight_recorder.py``).

In each communicator and thread, operations are counted from 1 on all ranks. The first operation that some rank has
begun and not all ranks have completed is the one at which the job hangs, or at which ranks parted. The explanation says
of each rank whether it waits in that operation, does something else there, or has not come to it, and its last call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py.bench import UsageError
from torchmpi_py.core.sequences import ranks_as_text
from torchmpi_py.watch import flight_recorder
from torchmpi_py.watch.flight_recorder import PREFIX

Entry = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``hang``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="with flight_recorder_0 and so on, there or further in"
    )


def main(options: argparse.Namespace) -> None:
    """Print the explanation of the dumps in a folder. UsageError if there are none."""
    print(explain(load(options.directory)), flush=True)


def load(directory: Path) -> dict[int, dict[str, Any]]:
    """The newest dump of each rank in a folder and its subfolders. UsageError if there are none."""
    paths = [path for path in directory.rglob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    try:
        dumps = [flight_recorder.read(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
        found = {int(dump["rank"]): dump for dump in dumps}
    except Exception as error:  # a broken pickle raises any
        raise UsageError(f"{directory}: a dump cannot be read: {error}") from error
    if not found:
        raise UsageError(
            f"{directory} has no dumps ({PREFIX}0, ...): a job that hangs leaves them where its report says"
        )
    return dict(sorted(found.items()))


def explain(dumps: Mapping[int, Mapping[str, Any]]) -> str:
    """The explanation of the dumps, by rank."""
    lines = [f"dumps of {_ranks(list(dumps))}"]
    for name, group in _groups(dumps).items():
        lines += _of_group(dumps, name, group)
    if len(lines) == 1:
        lines.append("no operation that all ranks call is incomplete, or differs")
    lines += [f"rank {rank}: {_last(dump['entries'])}" for rank, dump in dumps.items()]
    return "\n".join(lines)


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, Mapping[str, str]]:
    return {name: group for dump in dumps.values() for name, group in dump["pg_config"].items()}


def _of_group(dumps: Mapping[int, Mapping[str, Any]], name: str, group: Mapping[str, str]) -> list[str]:
    """The first operation of a communicator that is incomplete or differs, as each of its ranks has it; or nothing."""
    # Operations in order: the first that is not completed alike by all members is the one that is explained.
    members = json.loads(group["ranks"])
    calls = {rank: _calls(dumps[rank]["entries"], name) for rank in members if rank in dumps}
    for place in sorted({place for of_rank in calls.values() for place in of_rank}):
        here = {rank: of_rank[place] for rank, of_rank in calls.items() if place in of_rank}
        late = [rank for rank, of_rank in calls.items() if max(of_rank, default=0) < place]
        is_same = len({_comparable(entry) for entry in here.values()}) == 1
        if is_same and all(_is_over(entry) for entry in here.values()):
            continue
        lines = [f"communicator {group['desc']!r} ({_ranks(members)}), operation {place}:"]
        lines += list(_differing(here, is_same))
        lines += [f"  rank {rank} has not come to it" for rank in late]
        missing = [rank for rank in members if rank not in dumps]
        return [*lines, f"  {_ranks(missing)}: no dump"] if missing else lines
    return []


def _calls(entries: Sequence[Entry], name: str) -> dict[int, Entry]:
    of_group = (entry for entry in entries if entry["process_group"][0] == name)
    return {entry["collective_seq_id"]: entry for entry in of_group if entry["collective_seq_id"] > 0}


def _comparable(entry: Entry) -> str:
    return str(entry["what"]).partition(",")[0] if "any-size" in entry["what"] else str(entry["what"])


def _is_over(entry: Entry) -> bool:
    return entry["state"] == "completed" and not entry["has_failed"]


def _differing(here: Mapping[int, Entry], is_same: bool) -> Iterator[str]:
    """One line for all ranks in the same call and state."""
    ranks_of: dict[str, list[int]] = {}
    for rank, entry in here.items():
        ranks_of.setdefault(f"{_state(entry)} {entry['what']}, called at {entry['site']}", []).append(rank)
    for call, ranks in ranks_of.items():
        yield f"  {_ranks(ranks)} {call}"
    if not is_same:
        yield "  these are not the same"


def _state(entry: Entry) -> str:
    if entry["state"] == "completed":
        return "failed in" if entry["has_failed"] else "completed"
    return {"started": "in", "scheduled": "launched"}[entry["state"]]


def _last(entries: Sequence[Entry]) -> str:
    """A rank's call that is still running, or else its last one."""
    begun = [entry for entry in entries if entry["state"] == "started"]
    if not entries:
        return "has called nothing"
    last = begun[0] if begun else entries[-1]
    return f"{'still' if begun else 'last'} {_state(last)} {last['what']}, called at {last['site']}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_as_text(ranks)}"
