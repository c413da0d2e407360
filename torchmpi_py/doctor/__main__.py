"""Examine this machine: ``python -m torchmpi_py.doctor [--json] [--no-job] [--host-only]``.

Print one line per finding, and the remedy below each warning and problem. The exit code is 1 if there is a problem,
else 0.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterator

from torchmpi_py.doctor import PROBLEM, WARNING, Finding, host, software
from torchmpi_py.launch import surroundings


def main(words: list[str] | None = None) -> int:
    """Print the findings; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchmpi_py.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.add_argument("--no-job", action="store_true", help="do not run the test job of two ranks")
    parser.add_argument("--host-only", action="store_true", help="check only the host: no software, no test job")
    options = parser.parse_args(words)
    all_findings = []
    with_software = not options.host_only
    for finding in examine(with_software=with_software, with_job=with_software and not options.no_job):
        all_findings.append(finding)
        if not options.json:
            print(f"{finding.level:8} {finding.subject:17} {finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':26} -> {finding.remedy}", flush=True)
    numbers = collections.Counter(finding.level for finding in all_findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in all_findings], indent=1))
    else:
        counts = [f"{numbers[level]} {level}{'s' * (numbers[level] != 1)}" for level in (PROBLEM, WARNING)]
        print(f"== {', '.join(counts)}")
    return 1 if numbers[PROBLEM] else 0


def examine(*, with_software: bool = True, with_job: bool = True) -> Iterator[Finding]:
    """Yield findings one by one. The job of two ranks runs last, and only if no check has found a problem."""
    has_problem = False
    surroundings.set_home()  # Do the same as torchmpirun and mpi.start().
    for check in (*(software.CHECKS if with_software else ()), *host.CHECKS):
        try:
            for finding in check():
                has_problem |= finding.level == PROBLEM
                yield finding
        except Exception as error:
            # A check may fail on an unusual machine, but the other checks must still run.
            name = check.__name__.replace("_", " ")
            yield Finding(WARNING, name, f"could not be examined: {error!r}", "check it by hand, and report this line")
    if with_job and not has_problem:
        yield from software.trial()


if __name__ == "__main__":
    sys.exit(main())
