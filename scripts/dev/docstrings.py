"""Docstrings drawn at random from a checkout, beside the docstrings of the same names in other checkouts.

    python scripts/dev/docstrings.py --seed 7 --count 40 OLD [NEW ...]

Names are drawn from the first checkout, by qualified name (``Class.method``, ``function``, or ``module x``). In the
others the same name is looked up in any module; of several, the one in a module of the same name, else the one with the
most similar text. ``--words`` takes only docstrings in which one of the words occurs.
"""

import argparse
import ast
import collections
import difflib
import pathlib
import random
import re


def main():
    """Print each name with its docstring in every checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--words", type=lambda text: text.split(","), metavar="a,b")
    parser.add_argument("checkouts", nargs="*", type=pathlib.Path, default=[pathlib.Path(".")])
    options = parser.parse_args()
    first, *others = [docstrings(checkout / "torchmpi_py") for checkout in options.checkouts]
    pool = [(name, path, text) for name, found in first.items() for path, text in found if has(text, options.words)]
    drawn = random.Random(options.seed).sample(sorted(pool), min(options.count, len(pool)))
    for number, (name, path, text) in enumerate(drawn, 1):
        print(f"\n{number}. {name}\n{shown(options.checkouts[0], path, text)}")
        for checkout, found in zip(options.checkouts[1:], others, strict=True):
            print(shown(checkout, *closest(found.get(name, []), path, text)))


def docstrings(package):
    """{qualified name: [(path inside the package, docstring), ...]}."""
    found = collections.defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        where = path.relative_to(package)
        for name, node in [(f"module {where.stem}", tree), *definitions(tree, "")]:
            if text := ast.get_docstring(node):
                found[name].append((where, text))
    return found


def definitions(node, prefix):
    """(qualified name, node) of every class and function, nested ones included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def has(text, words):
    """Whether one of the words occurs, as a whole word; True without words."""
    return words is None or any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in words)


def closest(candidates, path, text):
    """Of several definitions of one name, the counterpart of the one at ``path``; (None, None) if there are none."""

    def likeness(candidate):
        return candidate[0].stem == path.stem, difflib.SequenceMatcher(None, candidate[1], text).ratio()

    return max(candidates, key=likeness, default=(None, None))


def shown(checkout, path, text):
    """A docstring with its place, indented."""
    if text is None:
        return f"   {checkout}: no such name with a docstring"
    return f"   {checkout}/{path}:\n" + "\n".join(f"      {line}" for line in text.splitlines())


if __name__ == "__main__":
    main()
