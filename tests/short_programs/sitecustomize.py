"""Python in the programs that tests start: without full collections of garbage, which take a third of a short program.

Most of them run while torch is imported and while the interpreter ends, over some half a million objects that stay. The
young generations are collected as ever. For ``pytest --short-programs``; where a test is about the end of a program,
its fixture ``full_collections`` leaves Python as it is.
"""

import atexit
import gc

gc.set_threshold(*gc.get_threshold()[:2], 1000)
atexit.register(gc.freeze)
