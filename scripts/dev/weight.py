"""Lines of code, comments and docstrings per room of the package, as a Markdown table.

    python scripts/dev/weight.py [CHECKOUT]
    python scripts/dev/weight.py --check    # fails if a room has more lines of code than weight_limits.txt allows
    python scripts/dev/weight.py --lower    # lowers the limits of rooms that have become smaller

A room is a folder of ``torchmpi_py``; modules that lie in no folder are the row "top". The sum of the limits only goes
down: a change that needs lines takes them from somewhere, and may move a limit from one room to another. Comments and
docstrings do not count. The limit "tests" is for all lines of ``tests/``.
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COLUMNS = ["modules", "lines", "code", "comments", "docstrings", "comments / 100 code"]
LIMITS = pathlib.Path(__file__).with_name("weight_limits.txt")


def main():
    """Print a row per room and the sum, or compare the rooms with their limits."""
    words = sys.argv[1:]
    if words and words[0] in ("--check", "--lower"):
        return check(lower=words[0] == "--lower")
    rooms = weights(pathlib.Path(words[0] if words else "."))
    print(f"| room | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}")
    for room in sorted(rooms):
        print_row(room, rooms[room])
    print_row("all", sum(rooms.values(), collections.Counter()))
    return 0


def weights(checkout):
    """Counts of each room."""
    package, rooms = checkout / "torchmpi_py", collections.defaultdict(collections.Counter)
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0] if path.parent != package else "top"
        rooms[room] += weight(path.read_text())
    return rooms


def check(*, lower):
    """Compare each room with its limit; ``lower``: write new limits where they are lower. The exit code."""
    checkout = LIMITS.parents[2]
    lines = {room: counts["code"] for room, counts in weights(checkout).items()}
    lines["tests"] = sum(path.read_text().count("\n") for path in (checkout / "tests").rglob("*.py"))
    limits = {room: int(limit) for limit, room in map(str.split, LIMITS.read_text().splitlines())}
    if lower:
        limits = {room: min(count, limits.get(room, count)) for room, count in sorted(lines.items())}
        LIMITS.write_text("".join(f"{limit:6} {room}\n" for room, limit in limits.items()))
    above = {room: count for room, count in lines.items() if count > limits.get(room, 0)}
    for room, count in above.items():
        print(
            f"{room}: {count} lines, {limits.get(room, 0)} in {LIMITS.name}; make it smaller, or take lines from a room"
        )
    return 1 if above else 0


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
    sys.exit(main())
