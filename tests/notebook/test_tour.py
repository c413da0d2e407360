"""The notebook of examples/, executed as Jupyter does."""

import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
pytest.importorskip("ipykernel", reason="pip install ipykernel")
for _module in ("sklearn", "matplotlib"):
    pytest.importorskip(_module, reason=f"the tour uses it: pip install {_module}")

TOUR = pathlib.Path(__file__).parents[2] / "examples" / "tour.ipynb"


def shown(cell):
    """What a cell shows: kinds of output, and text without numbers that differ from run to run."""
    streams, others = "", []
    for output in cell.outputs:
        if output.output_type == "stream":
            streams += output.text if output.name == "stdout" else ""
        elif output.output_type == "error":
            others.append((output.ename, output.evalue))
        else:
            others.append((output.output_type, *sorted(output.data)))
    text = re.sub(r"; rank \d failed after that, with exit code \d+", "", f"{streams}{others}")  # or MPI has ended it
    return re.sub(r"process \d+|\d+\.\d+|on \S+", "#", text)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")
def test_the_tour_shows_what_it_shows_here():
    committed = nbformat.read(TOUR, as_version=4)
    executed = nbclient.NotebookClient(
        nbformat.read(TOUR, as_version=4), timeout=100, resources={"metadata": {"path": str(TOUR.parent)}}
    ).execute()
    before, now = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (committed, executed))
    assert [shown(cell) for cell in now] == [shown(cell) for cell in before]
    assert sum("image/png" in shown(cell) for cell in now) == 1
    assert sum(output.output_type == "error" for cell in now for output in cell.outputs) == 2
