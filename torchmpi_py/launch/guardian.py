"""The guardian of a folder: a program that waits until torchmpirun has died, and then cleans up the job.

`cleanup.Guardian` starts this program. Until torchmpirun dies, the program imports only three standard modules, so that
it uses little memory.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.read(0, 1)
    sys.path.insert(0, __file__.rpartition("/torchmpi_py/")[0])
    from torchmpi_py.launch import cleanup

    cleanup.clean_up(sys.argv[1])
