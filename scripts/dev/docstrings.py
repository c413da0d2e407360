"""Docstrings: a check of those of public names, and a random sample of all, from one checkout or several.

    python scripts/dev/docstrings.py --check    # fails if a public name has an incomplete docstring
    python scripts/dev/docstrings.py --seed 7 --count 40 OLD [NEW ...]

A docstring is complete if its section "Args" names exactly the parameters, it has a section "Returns" if the function
returns something, and it begins with a verb or a noun. Class constructors count as functions, except of exceptions and
of classes whose objects only the package makes.

``tests/collectives/test_errors.py`` runs the examples.

A sample is drawn from the first checkout, by qualified name (``Class.method``, ``function``, or ``module x``). In the
others the same name is looked up in any module; of several, the one in a module of the same name, else the one with the
most similar text. ``--words`` takes only docstrings in which one of the words occurs.
"""

import argparse
import ast
import collections
import difflib
import doctest
import inspect
import pathlib
import random
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("nn", "optim", "engine", "paramserver", "sweeps", "torch_backend")
MADE_BY_PACKAGE = {"Communicator", "Experiment", "Handle", "ParameterServer", "Results", "Saved", "ServedTensors"}
SECTIONS = ("Args", "Returns", "Raises", "Examples")


def main():
    """Print each name with its docstring in every checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--words", type=lambda text: text.split(","), metavar="a,b")
    parser.add_argument("checkouts", nargs="*", type=pathlib.Path, default=[pathlib.Path(".")])
    options = parser.parse_args()
    if options.check:
        return check()
    first, *others = [docstrings(checkout / "torchmpi_py") for checkout in options.checkouts]
    pool = [(name, path, text) for name, found in first.items() for path, text in found if has(text, options.words)]
    drawn = random.Random(options.seed).sample(sorted(pool), min(options.count, len(pool)))
    for number, (name, path, text) in enumerate(drawn, 1):
        print(f"\n{number}. {name}\n{shown(options.checkouts[0], path, text)}")
        for checkout, found in zip(options.checkouts[1:], others, strict=True):
            print(shown(checkout, *closest(found.get(name, []), path, text)))
    return 0


def check():
    """Print what the public docstrings lack; return the exit code."""
    sys.path.insert(0, str(ROOT))
    wrong, counts, documented = {}, collections.Counter(), public_objects()
    for name, value in documented.items():
        sections = sections_of(inspect.getdoc(value) or "")
        counts.update(sections.keys() & set(SECTIONS))
        if reasons := faults(value, sections):
            wrong[name] = "; ".join(reasons)
    print(f"docstrings of {len(documented)} public names:", ", ".join(f"{counts[name]} {name}" for name in SECTIONS))
    for name in sorted(wrong):
        print(f"{name}: {wrong[name]}")
    return 1 if wrong else 0


def public_objects():
    """{name: function or class} of the package and its rooms, each once."""
    import importlib

    import torchmpi_py

    found, seen = {}, set()
    for room in (torchmpi_py, *(importlib.import_module(f"torchmpi_py.{name}") for name in ROOMS)):
        prefix = room.__name__.removeprefix("torchmpi_py").lstrip(".")
        for name in room.__all__:
            value = getattr(room, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                found[f"{prefix}.{name}".lstrip(".")] = value
                seen.add(id(value))
    return found


def run_examples(names):
    """Run the examples of all public names with these global names; return the reports of failures."""
    report = []
    for name, value in public_objects().items():
        text = inspect.getdoc(value) or ""
        if ">>>" in text:
            example = doctest.DocTestParser().get_doctest(text, dict(names), name, name, 0)
            doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    return report


def sections_of(text):
    """{title of a section: names of its entries} of a docstring in Google style."""
    found, title = {"": []}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r"([A-Z]\w+):", line):
            title = {"Yields": "Returns", "Example": "Examples"}.get(match[1], match[1])
            found[title] = []
        elif match := re.match(r"    \*{0,2}(\w+)(?: \(|:)", line):
            found[title].append(match[1])
        elif line and not line.startswith(" "):
            title = ""
    found[""] = text.split()[:2]
    return found


def faults(value, sections):
    """What is wrong with the sections of a function or class."""
    is_class = inspect.isclass(value)
    found, first = [], " ".join(sections[""])
    if re.match(r"(Of|That|As|The same)\b", first):
        found.append(f"begins with {first!r}, not with a verb or a noun")
    if is_class and (issubclass(value, BaseException) or value.__name__ in MADE_BY_PACKAGE):
        return found
    signature = inspect.signature(value)
    if (expected := list(signature.parameters)) != sections.get("Args", []):
        found.append(f"Args must be: {', '.join(expected)}")
    if not is_class and signature.return_annotation not in (None, "None") and "Returns" not in sections:
        found.append("has no Returns")
    return found


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
    sys.exit(main())
