"""The command ``timeline``: write an HTML page that shows the last operations of each rank of a job.

The page shows the flight recorder's records, up to 1024 operations per rank. These records are on the status boards
that ``torchmpirun --timeline`` keeps, or in the dumps of a job that hung. ``timeline_calls`` reads the records and
computes waits, and ``timeline_tables`` writes the tables. The script in ``timeline.html`` draws the operations.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.bench import UsageError, timeline_tables
from torchmpi_py.bench.timeline_calls import STATES, JobCalls, meet, read


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``timeline``."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder with the dumps of a job that hung")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="page to write; default: DIR/timeline.html")
    parser.add_argument("--about", type=Path, help=argparse.SUPPRESS)  # Only torchmpirun passes this option.


def main(options: argparse.Namespace) -> None:
    """Write the page. Raise UsageError if there are no records, or if the page cannot be written."""
    about: dict[str, Any] = json.loads(options.about.read_text()) if options.about else {}
    path: Path = options.output or options.directory / "timeline.html"
    job = read(options.directory, about)
    meet(job)
    try:
        trusted_files.write(path, page(job, about))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file with -o") from error
    if not about:
        print(f"wrote {path}; open it in a browser", flush=True)


def page(job: JobCalls, about: Mapping[str, Any]) -> str:
    """Return the HTML page. The page loads nothing from other files or the network."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    parts = timeline_tables.parts(job, about) | {"DATA": _as_script(data(job))}
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], text)


def _as_script(content: object) -> str:
    """Return JSON for a script element; escape "<", so that no text in the JSON can end the element."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def data(job: JobCalls) -> dict[str, Any]:
    """Return the operations in the form that the page's script reads, with times in us since ``begin_ns``.

    The last number of a call identifies the collective: it is the same on all ranks, and unique on the page. It is -1
    for operations that only some ranks call, such as ``send``.
    """
    begin_ns = min((call.launched for rank in job.ranks for call in rank.calls), default=0)
    texts: dict[str, int] = {}
    meetings: dict[tuple[str, int], int] = {}

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    ranks = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "ended": rank.how_ended,
            "dropped": rank.num_before,
            "calls": [
                [
                    index(call.text),
                    index(call.comm),
                    index(call.site),
                    call.num_bytes,
                    call.state,
                    round((call.begin - begin_ns) / 1000, 1),
                    round(call.duration_us, 1),
                    round((call.begin - call.launched) / 1000, 1),
                    round(call.wait_us, 1),
                    round(call.transfer_ns / 1000, 1),
                    -1 if call.key is None else meetings.setdefault(call.key, len(meetings)),
                ]
                for call in rank.calls
            ],
        }
        for rank in job.ranks
    ]
    return {"begin_ns": begin_ns, "texts": list(texts), "states": STATES, "ranks": ranks}
