"""Parallel experiments: groups of ranks that take configurations from a queue."""

from torchmpi_py.sweeps.early_stopping import ExperimentStopped, report, successive_halving
from torchmpi_py.sweeps.experiments import experiments
from torchmpi_py.sweeps.outcome import Experiment, Results

__all__ = ["Experiment", "ExperimentStopped", "Results", "experiments", "report", "successive_halving"]
