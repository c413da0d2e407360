"""``import torch`` in environments that no launcher should set, with the package installed."""

import random
import sys
import time

import odd_environments
from support import jobs

from torchmpi_py.launch import variables


def test_the_variables_of_odd_launchers_are_read_without_errors():
    """Without the guard that turns an error of the import into a warning. A second call changes nothing."""
    drawn = random.Random(0)
    for _ in range(1000):
        before = odd_environments.draw(drawn)
        once = dict(before)
        begin = time.process_time()
        variables.set_variables(once)
        seconds = time.process_time() - begin
        twice = dict(once)
        variables.set_variables(twice)
        assert (twice, seconds < odd_environments.MOST_SECONDS) == (once, True), before


def test_torch_can_be_imported_in_odd_environments():
    done = jobs.run(sys.executable, odd_environments.__file__, 40, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.stdout.splitlines()[-1:] == ["0 failed"], done.stdout + done.stderr


def test_an_error_of_the_import_is_a_warning():
    done = jobs.python("import sys; sys.modules['torchmpi_py.launch.variables'] = None; import torchmpi_py")
    assert done.returncode == 0, done.stderr
    assert "torchrun's variables are not set" in done.stderr
