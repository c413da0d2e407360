"""The notebook of examples/, executed as Jupyter does, and Jupyter's interrupt."""

import asyncio
import pathlib
import re

import pytest
from shells import wait_for_end

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
pytest.importorskip("ipykernel", reason="pip install ipykernel")
for _module in ("sklearn", "matplotlib"):
    pytest.importorskip(_module, reason=f"the tour uses it: pip install {_module}")

# Equal lines are one, however late a rank is on this machine.
PATIENCE = "from torchmpi_py.notebook import rank_output\nrank_output.HOLD_SECONDS = 60"
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
    return re.sub(r"process \d+|\d+\.\d+|on \S+", "#", f"{streams}{others}")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("default")
def test_the_tour_shows_what_it_shows_here():
    committed = nbformat.read(TOUR, as_version=4)
    executed = nbformat.read(TOUR, as_version=4)
    executed.cells[1].source += f"\n{PATIENCE}"
    nbclient.NotebookClient(executed, timeout=300, resources={"metadata": {"path": str(TOUR.parent)}}).execute()
    before, now = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (committed, executed))
    assert [shown(cell) for cell in now] == [shown(cell) for cell in before]
    assert sum("image/png" in shown(cell) for cell in now) == 1
    assert sum(output.output_type == "error" for cell in now for output in cell.outputs) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("default")
def test_jupyters_interrupt_and_the_end_of_its_kernel(tmp_path):
    """The interrupt reaches the ranks and leaves the launcher alone; a kernel that is shut down leaves no rank."""
    file = f"pathlib.Path({str(tmp_path)!r}, str(mpi.rank()))"
    sources = [
        f"%load_ext torchmpi_py.notebook\n{PATIENCE}",
        "%%torchmpi -n 2\nimport os, pathlib, time\nkept = 1",
        f"%%torchmpi\n{file}.write_text(str(os.getpid()))\ntime.sleep(1000)",
        "%%torchmpi\nmpi.allreduce(kept)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    asyncio.run(execute_and_interrupt(notebook, [tmp_path / "0", tmp_path / "1"]))
    *_, interrupted, after = [cell.outputs for cell in notebook.cells]
    assert [output.ename for output in interrupted] == ["RanksFailed"]
    assert "KeyboardInterrupt" in "".join(interrupted[0].traceback)
    assert [output.text for output in after] == ["[0-1] 2\n"]
    wait_for_end([int((tmp_path / rank).read_text()) for rank in "01"])


async def execute_and_interrupt(notebook, files):
    """Interrupt the kernel when the files have been written."""
    client = nbclient.NotebookClient(notebook, timeout=300, allow_errors=True)
    execution = asyncio.create_task(client.async_execute())
    while not all(file.exists() and file.read_text() for file in files):
        assert not execution.done(), notebook.cells
        await asyncio.sleep(0.1)
    await client.km.interrupt_kernel()
    await execution
