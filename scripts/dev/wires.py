"""The files that name each feature of training: a feature belongs in its own files, its factory and an export.

    python scripts/dev/wires.py [CHECKOUT]

Counts names in the code of ``nn``, ``optim`` and ``engine``, not words in comments, docstrings or messages.
"""

import io
import pathlib
import re
import sys
import tokenize

ROOMS = ("nn", "optim", "engine")
FEATURES = {
    "split": r"split_of|any_split|split_parameters|replicas_of|num_parts|by_replicas|\w*ParallelLinear",
    "compression": r"[cC]ompress\w*|BF16|FP16|TopK|PowerSGD",
    "sharded": r"_?sharded\w*|Sharded\w*|GradientOfOwners",
    "sparse": r"\w*[sS]parse\w*",
    "joining": r"[jJ]oining\w*|has_data",
    "elastic": r"\w*[eE]lastic\w*|survivors|ulfm",
    "checkpoint": r"\w*[cC]heckpoint\w*|hooks_of_run|folder_lock",
    "digests": r"first_batches|FirstBatches|\w*_digest|add_gradients?|set_batch",
}


def main():
    """Print a row per feature: the number of files, and their names."""
    checkout = pathlib.Path(sys.argv[1] if sys.argv[1:] else ".")
    paths = [path for room in ROOMS for path in sorted((checkout / "torchmpi_py" / room).glob("*.py"))]
    names = {path.relative_to(checkout / "torchmpi_py"): names_in(path.read_text()) for path in paths}
    print("| feature | files | which |\n| --- | ---: | --- |")
    for feature, pattern in FEATURES.items():
        files = [str(path) for path, found in names.items() if any(re.fullmatch(pattern, name) for name in found)]
        print(f"| {feature} | {len(files)} | {', '.join(files)} |")
    return 0


def names_in(text):
    """All names in the code of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


if __name__ == "__main__":
    sys.exit(main())
