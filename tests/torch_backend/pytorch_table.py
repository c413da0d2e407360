"""What gloo and "torchmpi" make of PyTorch's distributed tests, beside each other; and what of that is kept.

    tests/torch_backend/pytorch_table.py             runs both on 2 and 3 ranks, prints the table, compares it
    tests/torch_backend/pytorch_table.py --keep      and keeps it, in pytorch_cases.txt

A line of the table is a case: the outcomes of gloo and ours on each number of ranks, the guise under which ours ran
(see ``pytorch_cases``), and why it is skipped. A case that is kept as one that ours passes has to pass; none may fail.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import pytorch_jobs
import torch

KEPT = Path(__file__).with_name("pytorch_cases.txt")
BACKENDS = ("gloo", "torchmpi")
RANKS = (2, 3)
NONE = "-"


def kept() -> dict:
    """``{case: {(backend, ranks): status}}``."""
    lines = [line for line in KEPT.read_text().splitlines() if not line.startswith("#")]
    columns = [(backend, ranks) for ranks in RANKS for backend in BACKENDS]
    return {line.split()[0]: dict(zip(columns, line.split()[1 : 1 + len(columns)], strict=True)) for line in lines}


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


def table(outcomes: dict) -> list[str]:
    """The lines for ``{(backend, ranks): {case: Result}}``."""
    cases = sorted(set().union(*outcomes.values()))
    columns = [(backend, ranks) for ranks in sorted({ranks for _, ranks in outcomes}) for backend in BACKENDS]
    width = max(map(len, cases))
    heads = [f"{backend}@{ranks}" for backend, ranks in columns]
    lines = [" ".join(f"{text:{size}}" for text, size in zip(["#", *heads], [width, *[11] * len(heads)], strict=True))]
    lines[0] += " as       why"
    for case in cases:
        found = [outcomes.get(column, {}).get(case) for column in columns]
        statuses = [result.status if result else NONE for result in found]
        ours = [result for result, column in zip(found, columns, strict=True) if result and column[0] == "torchmpi"]
        ran = [result for result in ours if result.status != "skipped"]
        guise = ran[0].guise if ran else NONE
        why = "; ".join(dict.fromkeys(result.reason for result in ours if result.reason))
        lines.append(f"{case:{width}} {' '.join(f'{status:11}' for status in statuses)} {guise:8} {why}".rstrip())
    return lines


def run_all(folder: Path, ranks_wanted: list[int], backends=BACKENDS) -> dict:
    """All cases, on both backends."""
    outcomes = {}
    for ranks in ranks_wanted:
        for backend in backends:
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
    lines = table(outcomes)
    print("\n".join(lines))
    if chosen.keep:
        version = torch.__version__.partition("+")[0]
        KEPT.write_text("\n".join([f"# torch {version}; made by pytorch_table.py --keep", *lines, ""]))
    worse = [line for (backend, ranks), found in outcomes.items() for line in regressions(found, ranks, backend)]
    print("\n".join(worse or ["as kept"]))
    if others := sorted({ranks for _, ranks in outcomes} - set(RANKS)):
        print(f"nothing is kept of runs on {others} ranks: there only failures were looked for")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
