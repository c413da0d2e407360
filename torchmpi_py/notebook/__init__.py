"""Run cells of a notebook on ranks: ``%load_ext torchmpi_py.notebook``, then ``%%torchmpi -n 4`` at the top of a cell.

The ranks are a job of torchmpirun (``rank_job``). Each rank runs an IPython shell (``rank_program``), which keeps its
variables from cell to cell. A rank connects to the kernel through a socket, and proves that it has the key of its job.
The kernel sends cells to the ranks, and the ranks send output, values and errors to the kernel. ``cell_run`` displays
the output, and ``rank_output`` joins equal lines of several ranks into one line. ``magics`` defines the user's
commands.

Alternative: ipyparallel. Why not: it needs a cluster with a controller, and it cannot detect ranks that wait for each
other in a collective.
"""

from typing import Any

from torchmpi_py.errors import Unavailable


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to an IPython shell. ``%load_ext torchmpi_py.notebook`` calls this function.

    Args:
        shell (InteractiveShell): shell of the notebook's kernel.

    Raises:
        Unavailable: IPython is not installed.
    """
    try:
        from torchmpi_py.notebook.magics import TorchMPIMagics
    except ModuleNotFoundError as error:
        raise Unavailable(f"torchmpi_py.notebook needs IPython ({error}); run: pip install ipython") from None
    shell.register_magics(TorchMPIMagics)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks. ``%unload_ext torchmpi_py.notebook`` and ``%reload_ext`` call this function.

    Args:
        shell (InteractiveShell): shell of the notebook's kernel.
    """
    shell.magics_manager.registry["TorchMPIMagics"].stop()
