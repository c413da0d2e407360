"""What gloo and "torchmpi" make of PyTorch's distributed tests, beside each other; and what of that is kept.

    tests/torch_backend/pytorch_table.py             runs both on 2 and 3 ranks, prints the table, compares it
    tests/torch_backend/pytorch_table.py --keep      and keeps it, in pytorch_cases.txt

A section of the table has the cases with the same outcomes, of gloo and ours on each number of ranks, that ran under
the same guise (see ``pytorch_cases``), and a paragraph for each reason why ours were skipped. A case that is kept as
one that ours passes has to pass; none may fail. Of the cases that are skipped everywhere only the number is kept.
"""

import argparse
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import pytorch_jobs
import torch

KEPT = Path(__file__).with_name("pytorch_cases.txt")
BACKENDS = ("gloo", "torchmpi")
RANKS = (2, 3)


def kept() -> dict:
    """``{case: {(backend, ranks): status}}``."""
    found: dict = {}
    had: dict = {}
    for line in KEPT.read_text().splitlines():
        if line.startswith("=="):
            columns = [(backend, ranks) for ranks in RANKS for backend in BACKENDS]
            had = dict(zip(columns, line.split()[1:5], strict=True))
        elif not line.startswith("#"):
            found |= dict.fromkeys(re.findall(r"\btest_\w+", line), had)
    return found


def regressions(results: dict, ranks: int, backend: str = "torchmpi", chosen: list[str] | None = None) -> list[str]:
    """What is worse than what is kept, in words. ``chosen``: the cases that were asked for, if not all."""
    known = kept()
    passed = {case for case, had in known.items() if had.get((backend, ranks)) == "passed"}
    expected = passed if chosen is None else passed.intersection(chosen)
    worse = [f"{case} on {ranks} ranks: is not there; kept as passed" for case in sorted(expected - set(results))]
    for case, result in results.items():
        had = known.get(case, {}).get((backend, ranks), "skipped")
        if result.status not in ("passed", "skipped") or (had == "passed" and result.status != "passed"):
            worse.append(f"{case} on {ranks} ranks: {result.status} ({result.reason}); kept as {had}")
    return worse


def table(outcomes: dict, *, is_complete: bool) -> list[str]:
    """The lines for ``{(backend, ranks): {case: Result}}``; with the names of those that are skipped everywhere?"""
    columns = [(backend, ranks) for ranks in sorted({ranks for _, ranks in outcomes}) for backend in BACKENDS]
    sections: dict = {}
    for case in sorted(set().union(*outcomes.values())):
        found = [outcomes.get(column, {}).get(case) for column in columns]
        statuses = [result.status if result else "-" for result in found]
        ours = [result for result, (backend, _) in zip(found, columns, strict=True) if result and backend == "torchmpi"]
        guise = next((result.guise for result in ours if result.status != "skipped"), "-")
        why = "; ".join(dict.fromkeys(result.reason for result in ours if result.reason))
        sections.setdefault((*statuses, guise), {}).setdefault(why, []).append(case)
    lines = [f"# on {', '.join(f'{ranks} ranks {backend}' for backend, ranks in columns)}; the guise"]
    for section, paragraphs in sections.items():
        lines.append(f"== {' '.join(section)}")
        texts = [f"{why or 'on all ranks'}: {' '.join(cases)}" for why, cases in paragraphs.items()]
        if set(section) == {"skipped", "-"} and not is_complete:
            texts = ["; ".join(f"{len(cases)} x {why}" for why, cases in paragraphs.items())]
        for text in texts:
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def run_all(folder: Path, ranks_wanted: list[int]) -> dict:
    """All cases, on both backends."""
    outcomes = {}
    for ranks in ranks_wanted:
        for backend in BACKENDS:
            results = pytorch_jobs.run(backend, ranks, folder / f"{backend}-{ranks}")
            print(f"{backend} on {ranks} ranks: {pytorch_jobs.counts(results)}", file=sys.stderr, flush=True)
            outcomes[backend, ranks] = results
    return outcomes


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--keep", action="store_true", help="write the table to pytorch_cases.txt")
    parser.add_argument("--folder", type=Path, help="where the ranks note everything (default: none that stays)")
    chosen = parser.parse_args()
    if chosen.keep and chosen.ranks != list(RANKS):
        parser.error(f"what is kept has all of {RANKS} ranks")
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = run_all(chosen.folder or Path(temporary), chosen.ranks)
    print("\n".join(table(outcomes, is_complete=True)))
    if chosen.keep:
        head = f"# torch {torch.__version__.partition('+')[0]}; made by pytorch_table.py --keep"
        KEPT.write_text("\n".join([head, *table(outcomes, is_complete=False), ""]))
    worse = [line for (backend, ranks), found in outcomes.items() for line in regressions(found, ranks, backend)]
    print("\n".join(worse or ["as kept"]))
    if others := sorted({ranks for _, ranks in outcomes} - set(RANKS)):
        print(f"nothing is kept of runs on {others} ranks: there only failures were looked for")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
