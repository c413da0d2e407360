"""Hyperparameter sweeps: groups of ranks run one experiment each, and take further configurations from a queue."""

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
