"""Run an example in float64 on the first 177 samples: three steps, the last one on fewer samples.

The arguments are the example's name and its options.
"""

import runpy
import sys
from pathlib import Path
from unittest import mock

from torch.utils.data import TensorDataset

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import digits_data  # noqa: E402

prepare = digits_data.prepare


def prepare_in_float64(options):
    """What ``digits_data.prepare`` returns, in float64, and less of it."""
    *sets, network = prepare(options)
    images_and_labels = [[x[:177] for x in dataset.tensors] for dataset in sets]
    return *(TensorDataset(images.double(), labels) for images, labels in images_and_labels), network.double()


sys.argv = sys.argv[1:]
with mock.patch.object(digits_data, "prepare", prepare_in_float64):
    runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
