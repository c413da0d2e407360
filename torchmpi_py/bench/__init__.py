"""Measurements: ``torchmpirun -n 2 -m torchmpi_py.bench compare --verb allreduce --sizes 4:64M:8x``.

What is measured, and how, stands in docs/bench.md.
"""
