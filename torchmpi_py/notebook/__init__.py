"""Run cells of a notebook on ranks: ``%load_ext torchmpi_py.notebook``, then ``%%torchmpi -n 4`` at the top of a cell.

The ranks are a job of torchmpirun (``rank_job``). Each rank runs an IPython shell (``rank_program``), whose variables
last from cell to cell. A rank connects to the kernel by a socket, and proves that it knows the key of its job. The
kernel sends cells, and the ranks send output, values and errors. ``cell_run`` shows them, and ``rank_output`` joins
equal lines of several ranks into one. ``magics`` defines the commands of the user. The alternative, ipyparallel, needs
a cluster with a controller, and knows nothing of ranks that wait for each other in a collective.
"""

from typing import Any

from torchmpi_py.errors import Unavailable


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to an IPython shell. ``%load_ext torchmpi_py.notebook`` calls it.

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
    """End the ranks. ``%unload_ext torchmpi_py.notebook`` and ``%reload_ext`` call it.

    Args:
        shell (InteractiveShell): shell of the notebook's kernel.
    """
    shell.magics_manager.registry["TorchMPIMagics"].stop()
