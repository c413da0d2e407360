import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from torchmpi_py.bench import UsageError, results
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, HOST_COPY, RAW_MPI
from torchmpi_py.bench.results import COLLECTIVE, Report, ResultRow, load, make_row, quantile, store


def report(verb="allreduce", kinds=("warm", "cold")):
    rows = [
        ResultRow(num_bytes, what, kind, seconds * num_bytes, 2 * seconds * num_bytes, 7)
        for num_bytes in (4, 1 << 20)
        for kind in kinds
        for what, seconds in (("mpi", 2e-9), ("ring", 1e-9), (RAW_MPI, 3e-9), (COPY, 0.5e-9))
    ]
    return Report(verb, "float32", "sum", 4, {"processor": "a fast one", "cores": "8"}, ["a remark"], rows)


def test_quantiles_are_times_that_were_measured():
    times = [float(second) for second in range(100, 0, -1)]
    assert quantile(times, 0.5) == 50
    assert quantile(times, 0.99) == 99
    assert quantile([3.0], 0.5) == quantile([3.0], 0.99) == 3
    assert make_row(8, "mpi", "warm", [1.0, 3.0, 2.0]) == ResultRow(8, "mpi", "warm", 2.0, 3.0, 3)


def test_bandwidths_and_ratios():
    measured = report()
    ring = measured.rows[1]
    assert ring.bytes_per_second == pytest.approx(1e9)
    assert measured.bus_bytes_per_second(ring) == pytest.approx(1.5e9)
    assert measured.times_faster(ring, RAW_MPI) == pytest.approx(3)
    assert measured.times_faster(ring, COPY) == pytest.approx(0.5)
    assert measured.times_faster(ring, "torch gloo") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "else"}', '{"format": "torchmpi_py.bench collective 1"}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"cannot read .*r\.json as a report"):
        load(tmp_path / "r.json")


def test_the_table_is_markdown_and_the_summary_names_the_fastest():
    text = results.render(report())
    assert "- cores: 8" in text
    assert "Note: a remark." in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1
    assert [cell.strip() for cell in lines[0].strip("|").split("|")][-2:] == ["x raw MPI", "x limit"]
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == ["4", "ring", "warm", "0.00400", "0.00800", "1.00", "1.50", "3.00", "0.500"]
    assert text.splitlines()[-1] == (
        "Fastest, cold buffers: 4 B ring (3.00 x raw MPI, 0.500 x limit); 1 MiB ring (3.00 x raw MPI, 0.500 x limit)."
    )
    alone = dataclasses.replace(report(), rows=report().rows[2:3])  # with nothing to be compared with
    assert "x raw MPI" not in results.render(alone)


def test_a_peer_that_is_the_fastest_is_in_the_summary():
    rows = [row for row in report(kinds=("warm",)).rows if row.what != "ring" and row.num_bytes == 4]
    rows[1] = dataclasses.replace(rows[1], median_seconds=rows[0].median_seconds / 2)
    assert results.summary(dataclasses.replace(report(), rows=rows)) == (
        "Fastest, warm buffers: 4 B raw MPI (0.500 x limit), our fastest: mpi (0.500 x raw MPI, 0.250 x limit)."
    )
    assert results.summary(dataclasses.replace(report(), rows=rows[:1])) == "", "there is no other candidate"


def on_gpus():
    names = {"mpi": "staged", "ring": "cudaipc", RAW_MPI: DEVICE_COPY, COPY: HOST_COPY}
    rows = [dataclasses.replace(row, what=names[row.what]) for row in report().rows]
    return dataclasses.replace(report(), rows=rows, device="cuda", facts={"GPUs": "1 x A GPU"})


def test_stored_reports_are_plain_and_those_from_before_there_were_devices_are_of_the_cpu(tmp_path):
    store(COLLECTIVE, report(), path := tmp_path / "r.json")
    assert load(path) == report()
    stored = json.loads(path.read_text())
    assert stored["rows"][0]["what"] == "mpi"
    del stored["device"]
    path.write_text(json.dumps(stored))
    assert load(path) == report()


def run_program(monkeypatch, name, *words):
    """Run a program of ``benchmarks/`` with these words on its command line."""
    path = Path(__file__).parents[2] / "benchmarks" / name
    monkeypatch.setattr("sys.argv", [str(path), *map(str, words)])
    runpy.run_path(str(path), run_name="__main__")


def drawn(monkeypatch, name, *words):
    """The figure that a program draws."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: figures.append(figure))
    run_program(monkeypatch, name, *words)
    return figures[0]


def test_a_picture_hides_no_series_and_is_labelled(monkeypatch, tmp_path):
    facts = {"torch": "9.1", "MPI": "Some MPI 7", "torchmpi_py": "0.3", "date": "2031-05-06 07:08 UTC"}
    measured = dataclasses.replace(report(), facts=facts, rows=report().rows[:4])  # one size: a line is one point
    store(COLLECTIVE, measured, path := tmp_path / "r.json")
    figure = drawn(monkeypatch, "plot.py", path, "r.png")
    for axes in figure.axes:
        assert {line.get_label() for line in axes.lines} == {"mpi", "ring", RAW_MPI, COPY}
        assert all(line.get_marker() not in (None, "None", "") for line in axes.lines)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"mpi", "ring", RAW_MPI, COPY}
    for part in ("torchmpi_py 0.3, torch 9.1, Some MPI 7; 2031-05-06", "allreduce (sum) of float32, 4 ranks"):
        assert part in figure.get_suptitle()
    store(COLLECTIVE, on_gpus(), path)
    figure = drawn(monkeypatch, "plot.py", path, "r.png")
    assert DEVICE_COPY in {line.get_label() for line in figure.axes[-1].lines}


def curve(path, ranks, seconds):
    about = {"program": "digits", "ranks": ranks, "versions": "torch 9.1", "date": "2031-05-06"}
    path.write_text(json.dumps({"seconds": seconds, "accuracy": [0.5, 0.75], **about}))
    return path


def test_curves_of_examples_and_their_scaling_are_drawn(monkeypatch, tmp_path):
    paths = [curve(tmp_path / f"on{ranks}.json", ranks, [4 / ranks, 8 / ranks + 1]) for ranks in (1, 4)]
    figure = drawn(monkeypatch, "curves.py", *paths, "c.png")
    accuracy, scaling = figure.axes
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[50, 75]] * 2
    assert [list(line.get_ydata()) for line in scaling.lines] == [[9, 3], [9, 2.25]]
    assert "torch 9.1; 2031-05-06" in figure.get_suptitle()
    assert len(figure.legends[0].get_texts()) == 4


def test_a_report_is_drawn_and_what_cannot_be_drawn_is_refused(monkeypatch, tmp_path):
    """What is no report; a picture of an unknown kind."""
    pytest.importorskip("matplotlib")
    store(COLLECTIVE, report(), path := tmp_path / "r.json")
    run_program(monkeypatch, "plot.py", path, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"cannot read .*c\.json as a report that run or compare wrote"):
        run_program(monkeypatch, "plot.py", curve(tmp_path / "c.json", 1, [1, 2]), "c.png")
    with pytest.raises(SystemExit, match=r"cannot draw to r\.foo"):
        run_program(monkeypatch, "plot.py", path, "r.foo")
