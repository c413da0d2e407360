"""Print the versions of the software that jobs on this machine use: ``python -m torchmpi_py``."""

import torchmpi_py
from torchmpi_py.doctor import software

if __name__ == "__main__":
    print(f"torchmpi_py {torchmpi_py.__version__}")
    for check in (software.python, software.torch, software.mpi):
        for finding in check():
            print(finding.subject, finding.text)
