"""The tables of a timeline page as HTML: facts about the job, its ranks, and its operations by call and size."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torchmpi_py.bench.buffers import format_size
from torchmpi_py.bench.timeline_calls import COMPLETE, JobCalls, RecordedCall
from torchmpi_py.core.sequences import ranks_as_text

_MOST_ROWS = 60
_TIMES = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def parts(job: JobCalls, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the page, by the name of the placeholder that each part replaces."""
    title = f"Timeline of {about['command']}" if about else "Timeline of a job that hung"
    return {
        "TITLE": escape(title),
        "FACTS": "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in _facts(job, about).items()),
        "END": _end(about),
        "RANKS": _table(_RANK_COLUMNS, _rank_rows(job)),
        "OPERATIONS": _operations(job),
    }


def duration(microseconds: float) -> str:
    """Return a time as text with three significant digits and a unit."""
    return _with_unit(microseconds, _TIMES)


def bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth as text with three significant digits and a unit."""
    return _with_unit(bytes_per_second, _RATES)


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.3g} {unit}" if value / size < 999.5 else f"{value / size:.0f} {unit}"


def _facts(job: JobCalls, about: Mapping[str, Any]) -> dict[str, str]:
    here = [rank.rank for rank in job.ranks]
    hosts: dict[str, list[int]] = {}
    for rank in job.ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    lost = sorted(set(range(job.num_ranks)) - set(here))
    end_ns = about.get("ended_ns") or max((call.end for rank in job.ranks for call in rank.calls), default=0)
    end = dt.datetime.fromtimestamp(end_ns / 1e9, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = ", ".join(f"{host} ({_ranks(ranks)})" for host, ranks in hosts.items() if host)
    facts = {
        "command": about.get("command", ""),
        "end": f"{end}, exit code {about['exit_code']}" if about else end,
        "ranks": f"{job.num_ranks} on {where}",
        "no record": f"{_ranks(lost)}, whose host may not share the page's folder" if lost else "",
        "versions": job.versions,
        "records": _whose_records(job, about),
    }
    return {name: text.removesuffix(" on ") for name, text in facts.items() if text}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_as_text(ranks)}"


def _whose_records(job: JobCalls, about: Mapping[str, Any]) -> str:
    """Return a text about the start of the job that left the records, or "" if this was the last start."""
    if job.is_of_last:
        return ""
    whose = f"restart {job.restart}" if job.restart else "the first start"
    return f"from {whose}, because restart {about['restart']} did not complete mpi.start()"


def _end(about: Mapping[str, Any]) -> str:
    """Return an HTML section with the reason why the job failed, or "" if the job did not fail."""
    if not about.get("reason") or not about["exit_code"]:
        return ""
    return f"<section><h2>Why the job ended</h2><p><strong>{escape(about['reason'])}</strong></p></section>"


_RANK_COLUMNS = ("rank", "called last", "kept others waiting", "waited", "operations", "ended", "host", "last call")


def _rank_rows(job: JobCalls) -> Iterable[Sequence[str]]:
    num_met = sum(rank.num_last for rank in job.ranks)
    for rank in job.ranks:
        total = len(rank.calls) + rank.num_before
        last = max(rank.calls, key=lambda call: (call.state != COMPLETE, call.end), default=None)
        yield (
            str(rank.rank),
            f"{rank.num_last} of {num_met}",
            duration(rank.kept_others_us),
            duration(rank.waited_us),
            f"the last {len(rank.calls)} of {total}" if rank.num_before else str(total),
            rank.how_ended,
            rank.host,
            "" if last is None else f"{last.text} at {last.site}",
        )


_OPERATION_COLUMNS = ("operation", "bytes", "calls", "time per rank", "waiting", "transfer", "bandwidth")


def _operations(job: JobCalls) -> str:
    """Return a table of the operations by text and size, the operation with the most time first."""
    found: dict[tuple[str, int], list[tuple[int, RecordedCall]]] = {}
    for rank in job.ranks:
        for call in rank.calls:
            num_bytes = 0 if "any-size" in call.text else call.num_bytes  # Ignore sizes that differ between ranks.
            found.setdefault((call.text, num_bytes), []).append((rank.rank, call))
    rows = sorted((_operation_row(*what, calls) for what, calls in found.items()), key=lambda row: -row[0])
    left = len(rows) - _MOST_ROWS
    note = f"<p>Number of further operations, which take less time: {left}.</p>" if left > 0 else ""
    return _table(_OPERATION_COLUMNS, (row[1] for row in rows[:_MOST_ROWS])) + note


def _operation_row(text: str, num_bytes: int, calls: Sequence[tuple[int, RecordedCall]]) -> tuple[float, Sequence[str]]:
    """Return (time per rank in us, cells). A collective counts as one operation, regardless of the number of ranks."""
    keys = {call.key for _, call in calls if call.key is not None}
    num_operations = len(keys) + sum(call.key is None for _, call in calls)
    mean_us = sum(call.duration_us for _, call in calls) / len({rank for rank, _ in calls})
    known = [call for _, call in calls if call.wait_us >= 0]
    known_us = sum(call.duration_us for call in known)
    waiting = f"{100 * sum(call.wait_us for call in known) / known_us:.0f} %" if known_us else "-"
    transfers = [call.transfer_ns for call in {call.key: call for call in known}.values() if call.transfer_ns]
    median_ns = statistics.median(transfers) if transfers else 0
    return mean_us, (
        text,
        format_size(num_bytes) if num_bytes else "-",
        str(num_operations),
        duration(mean_us),
        waiting,
        duration(median_ns / 1000) if median_ns else "-",
        bandwidth(num_bytes / median_ns * 1e9) if median_ns and num_bytes else "-",
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
