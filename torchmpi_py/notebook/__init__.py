"""Ranks of a notebook: ``%load_ext torchmpi_py.notebook``, then ``%%torchmpi -n 4`` at the top of a cell.

The ranks are a job of torchmpirun (``rank_job``). Each runs ``rank_program``: an IPython of its own, which lives from
cell to cell. A rank connects to the kernel by TCP, with a key that the kernel has given to its job. The kernel sends
cells, the ranks send what comes of them; ``cell_run`` shows that, with equal lines of several ranks as one line
(``rank_output``). ``magics`` is what the user calls.
"""

from typing import Any

from torchmpi_py.errors import Unavailable


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to an IPython shell, for ``%load_ext torchmpi_py.notebook``. Unavailable without IPython."""
    try:
        from torchmpi_py.notebook.magics import TorchMPIMagics
    except ModuleNotFoundError as error:
        raise Unavailable(f"torchmpi_py.notebook needs IPython ({error}); run: pip install ipython") from None
    shell.register_magics(TorchMPIMagics)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks, for ``%unload_ext`` and ``%reload_ext``."""
    shell.magics_manager.registry["TorchMPIMagics"].stop()
