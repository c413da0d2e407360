"""How tests start a program of examples/ as its users do."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
if not TORCHMPIRUN.exists():
    pytest.skip(f"no {TORCHMPIRUN}: install the package", allow_module_level=True)


def start(num_ranks, name, *options):
    """The finished process of a program on this many ranks."""
    command = [TORCHMPIRUN, "-n", num_ranks, EXAMPLES / name, *options]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
