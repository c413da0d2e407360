"""Lint of words: what prose should not say in added lines of pages, docstrings, comments and messages.

    python scripts/dev/words.py          # lines that this change adds; fails if one of them has a fault
    python scripts/dev/words.py --all    # every line; prints the number of faults of each file

A change is everything since the merge base with origin/main, or since HEAD~1 without a remote, with the work tree.
Code in backticks may hold any word.
"""

import ast
import collections
import io
import pathlib
import re
import subprocess
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
WORDS = {  # pattern: what to write
    r"verbs?(?! \()": "collective",
    r"(asynchronous )?twins?": "asynchronous version",
    r"meetings?": "barrier",
    r"deadlines?": "timeout",
    r"starters?": "mpirun",
    r"chief": "rank 0, main process",
    r"modes? of distribution": "training strategy",
    r"but (for|in)(?! MPI)": "except (in)",
    r"alike": "with the same arguments on every rank",
    r"anew": "again",
    r"by itself": "automatically",
    r"in turns": "alternately",
    r"percent points": "percentage points",
    r"price of (a|each|every|one) call": "per-call overhead",
    r"(owner updates?|divided state)": "sharded optimizer",
    r"split layers": "tensor parallelism",
    r"who (is|are|was|came|comes) (late|last)": "which ranks are late",
    r"one a line": "one per line",
    r"leave (it |them )?away": "omit",
    r"(?<!there )(is|are) (?-i:none|no job)": "is not valid",
}
LONGEST = 30  # words of a sentence
READ = re.compile(r"docs/(?!decisions/).*\.md|README\.md|CHANGELOG\.md|torchmpi_py/.*\.py")
NEW_PARAGRAPH = re.compile(
    r"\s*$|\s*([-*+]|\d+\.) |\s*[|#>]|\s*(!!!|:::)|\s*[*`]*\w+[*`]*( \([^)]*\))?: |\s*\w+:$|\s*(torchmpirun|python) "
)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[^a-z])|\|")


def git(*words):
    """Output of a git command; empty where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def changes():
    """{path: numbers of added lines}; without an earlier commit only files that git does not know."""
    head = git("rev-parse", "--verify", "--quiet", "HEAD")
    base = git("merge-base", "HEAD", "origin/main")
    if base in ("", head):
        base = git("rev-parse", "--verify", "--quiet", "HEAD~1") or head
    added, path = collections.defaultdict(set), ""
    for line in git("diff", "--unified=0", "--no-color", "--no-ext-diff", base).splitlines() if base else ():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            added[path].update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return added | {path: range(1, 100_000) for path in git("ls-files", "-o", "--exclude-standard").splitlines()}


def paragraphs(text, first=1):
    """[(number, line), ...] of each paragraph, list item, argument or row of a table; ``first``: the first number."""
    lines = []
    for number, line in enumerate([*text.splitlines(), ""], first):
        if NEW_PARAGRAPH.match(line):
            yield lines
            lines = []
        lines += [(number, line)] * bool(line.strip())


def page(text):
    """Paragraphs of Markdown without code blocks and HTML comments."""
    blocks = r"^( *)(```|~~~).*?^\1\2$|<!--.*?-->"
    return paragraphs(re.sub(blocks, lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE))


def module(text):
    """Paragraphs of a module's docstrings and comments, and its messages."""
    tree, comments = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.kind = "docstring"
            yield from paragraphs(re.sub(r" *>>>.*", "", node.value.value), node.lineno)
            if odd := re.match(r"(Of|That|The same|As)\b", node.value.value):
                yield [(node.lineno, f"\0{odd[0]}")]
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "`x`" for part in node.values]
            yield [(node.lineno, "".join(map(str, parts)))]
            for part in node.values:
                part.kind = "docstring"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.kind != "docstring":
            yield [(node.lineno, node.value)] if node.value.count(" ") > 2 else []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.search(r"fmt:|noqa|type: ignore", token.string):
            if comments and comments[-1][0] != token.start[0] - 1:
                yield comments
                comments = []
            comments = [*comments, (token.start[0], token.string.lstrip("# "))]
    yield comments


def faults(paragraph, is_for_developers):
    """(number of the line, fault) of a paragraph."""
    text = re.sub(r"\]\([^)]*\)|&\w+;", "", "\n".join(line for _, line in paragraph))
    text = re.sub(r"(``?)[^`]+\1", lambda code: "C" + "\n" * code[0].count("\n"), text)

    def number(place):
        return paragraph[min(text.count("\n", 0, place), len(paragraph) - 1)][0]

    if text.startswith("\0"):
        yield number(0), f"a docstring begins with {text[1:]!r} -> a verb, or the noun returned"
    for pattern, better in WORDS.items():
        for match in re.finditer(rf"\b{pattern}\b", text, re.IGNORECASE):
            if not (is_for_developers and pattern.startswith("verb")):
                yield number(match.start()), f"{match[0]} -> {better}"
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]:
        count = len(re.findall(r"[A-Za-z][\w'-]*", text[start:end]))
        if count > LONGEST:
            yield number(start), f"a sentence of {count} words -> at most {LONGEST}"
        start = end
    if text.count(";") > 1 and "|" not in text:
        yield number(text.rindex(";")), f"{text.count(';')} semicolons in a paragraph -> at most one"


def main():
    """Print the faults of added lines; with --all their number in each file. The exit code."""
    added, total, counts = changes(), 0, "--all" in sys.argv
    for path in filter(READ.fullmatch, git("ls-files").splitlines() if counts else sorted(added)):
        parts = filter(None, (page if path.endswith(".md") else module)((ROOT / path).read_text()))
        found = [fault for part in parts for fault in faults(part, path.startswith("docs/dev/"))]
        found = sorted(fault for fault in set(found) if counts or fault[0] in added[path])
        print(f"{len(found):5} {path}\n" if counts else "".join(f"{path}:{n}: {fault}\n" for n, fault in found), end="")
        total += len(found)
    print(f"words: {total} faults")
    return int(total > 0 and not counts)


if __name__ == "__main__":
    sys.exit(main())
