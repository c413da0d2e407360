"""Right values of every verb and flavour, for machines without pytest: run it under torchmpirun, with cuda or cpu.

The bench compares every result with the exact one before it takes times; here that is the point, and the times are not.
"""

import sys

from torchmpi_py.bench.__main__ import main
from torchmpi_py.bench.cases import VERBS

if __name__ == "__main__":
    options = ["--device", sys.argv[1], "--sizes", "4,5M,40M", "--seconds", "0.001", "--buffers", "warm"]
    sys.exit(max(main(["compare", "--verb", verb, *options]) for verb in VERBS))
