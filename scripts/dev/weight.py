"""Lines of code, comments and docstrings per room of the package, as a Markdown table.

    python scripts/dev/weight.py [CHECKOUT]

A room is a folder of ``torchmpi_py``; modules that lie in no folder are the row "top".
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COLUMNS = ["modules", "lines", "code", "comments", "docstrings", "comments / 100 code"]


def main():
    """Print a row per room, and the sum."""
    package = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "torchmpi_py"
    rooms = collections.defaultdict(collections.Counter)
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0] if path.parent != package else "top"
        rooms[room] += weight(path.read_text())
    print(f"| room | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}")
    for room in sorted(rooms):
        print_row(room, rooms[room])
    print_row("all", sum(rooms.values(), collections.Counter()))


def print_row(room, counts):
    """One row of the table."""
    ratio = 100 * counts["comments"] / max(1, counts["code"])
    print(f"| {room} | {' | '.join(str(counts[column]) for column in COLUMNS[:-1])} | {ratio:.1f} |")


def weight(text):
    """Counts of one module. A line with code and a comment counts as both."""
    docstrings = {line for node in ast.walk(ast.parse(text)) for line in docstring_lines(node)}
    code, comments = set(), set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1)) - docstrings
    counts = {"modules": 1, "lines": text.count("\n"), "code": len(code), "comments": len(comments)}
    return collections.Counter(counts | {"docstrings": len(docstrings)})


def docstring_lines(node):
    """Lines of the docstring of a module, class or function, and of a string that stands below an attribute."""
    for child in getattr(node, "body", []) if isinstance(node, DOCUMENTED) else []:
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield from range(child.lineno, child.end_lineno + 1)


if __name__ == "__main__":
    main()
