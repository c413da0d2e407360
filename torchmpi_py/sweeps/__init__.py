"""Hyperparameter sweeps: each group of ranks runs one experiment at a time, until every configuration has been run."""

from torchmpi_py.sweeps.early_stopping import ExperimentStopped, experiment_folder, report, successive_halving
from torchmpi_py.sweeps.experiments import experiments
from torchmpi_py.sweeps.outcome import Experiment, Results

__all__ = [
    "Experiment",
    "ExperimentStopped",
    "Results",
    "experiment_folder",
    "experiments",
    "report",
    "successive_halving",
]
