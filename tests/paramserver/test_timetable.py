"""When what is due, against timetables written by hand."""

import pytest

from torchmpi_py.paramserver import Timetable


def steps(table, what, last):
    return [step for step in range(last + 1) if getattr(table.at(step), what)]


def test_the_examples_of_the_reference():
    """D=20, U=50, F=25, S=25 and D=50, U=10, F=3: fetched F steps before, the first time as well."""
    table = Timetable(init_delay=20, update_frequency=50, prefetch=25, send_frequency=25)
    lines = ["20  shard", "45  send, prefetch", "70  send, integrate", "95  send, prefetch"]
    assert [line.strip() for line in table.describe(96).splitlines()] == lines
    assert steps(table, "integrate", 200) == [70, 120, 170]
    assert steps(table, "prefetch", 200) == [45, 95, 145, 195]
    assert steps(table, "send", 200) == [45, 70, 95, 120, 145, 170, 195]
    table = Timetable(init_delay=50, update_frequency=10, prefetch=3)
    assert steps(table, "integrate", 90) == [60, 70, 80, 90]
    assert steps(table, "prefetch", 90) == [57, 67, 77, 87]
    assert steps(table, "send", 55) == [51, 52, 53, 54, 55]


@pytest.mark.parametrize("prefetch", [0, 1, 4, 5])
@pytest.mark.parametrize("delay", [0, 1, 7])
def test_every_integration_has_its_fetch(prefetch, delay):
    table = Timetable(init_delay=delay, update_frequency=5, prefetch=prefetch)
    integrations = steps(table, "integrate", 60)
    assert integrations[0] == delay + 5
    fetches = steps(table, "prefetch", 60)
    assert [step + prefetch for step in fetches if step + prefetch <= 60] == integrations
    assert min(fetches) >= delay


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 11}, "prefetch=11 is more than update_frequency=10"),
        ({"update_frequency": 0}, "update_frequency=0: expected a whole number"),
        ({"send_frequency": 2.5}, r"send_frequency=2\.5"),
        ({"init_delay": -1}, "init_delay=-1"),
        ({"prefetch": True}, "prefetch=True"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        Timetable(**options)
