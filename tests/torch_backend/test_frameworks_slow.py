import pathlib
import subprocess
import sys

import pytest

TORCHMPIRUN = pathlib.Path(sys.executable).with_name("torchmpirun")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_lightning_torchmetrics_and_compiled_functions():
    """On 3 ranks each compares with what it computes alone; it does not destroy the group before it ends."""
    pytest.importorskip("lightning")
    script = pathlib.Path(__file__).with_name("slow_frameworks.py")
    done = subprocess.run(
        [TORCHMPIRUN, "-n", "3", script], capture_output=True, text=True, timeout=190, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 agrees" for rank in range(3)]
