"""The outcomes of all trials of a test run, in one table at its end; for conftest.py of folders with trials."""

import statistics

import pytest

rows = []  # (kind, seconds, problems) of each trial


@pytest.fixture
def judge():
    """Collect the outcomes of trials, and fail if any has a problem. ``kind_of``: the kind of an outcome."""

    def note(kind, outcomes, kind_of=None):
        rows.extend((kind_of(o) if kind_of else kind, o.seconds, bool(o.problems)) for o in outcomes)
        bad = [outcome.describe() for outcome in outcomes if outcome.problems]
        assert not bad, f"{len(bad)} of {len(outcomes)} trials\n" + "\n".join(bad[:5])

    return note


def pytest_terminal_summary(terminalreporter):
    """Trials, times in seconds, failures."""
    if not rows:
        return
    terminalreporter.section("trials")
    width = max(len(kind) for kind, *_ in rows)
    terminalreporter.write_line(f"{'kind':{width}} {'trials':>6} {'median s':>9} {'max s':>7} {'failed':>6}")
    for kind in dict.fromkeys(kind for kind, *_ in rows):
        times = [seconds for of, seconds, _ in rows if of == kind]
        failed = sum(has_failed for of, _, has_failed in rows if of == kind)
        median = statistics.median(times)
        terminalreporter.write_line(f"{kind:{width}} {len(times):6} {median:9.2f} {max(times):7.2f} {failed:6}")
    rows.clear()  # several folders show them
