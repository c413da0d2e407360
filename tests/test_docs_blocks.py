"""Python in README.md and docs/: programs run as they stand, fragments are held against what they are taken from.

A block is a program if it begins with ``# name.py``, or starts a session; a diff that begins so is the program after
the change. It runs with the commands of the console blocks below that name it, else on two ranks, and the output shown
there is compared: as a bag of lines, for ranks print in any order; a line ``...`` stands for others. All other blocks
have a mark, an HTML comment right above the block:

    fragment of PATH         each line occurs in that file of the repository, in this order
    continues: NAME          part of the program NAME of the page, after what the page shows of NAME before
    output of NAME           (of a text) lines that NAME prints
    output varies: REASON    (of a console block) the commands run, the output is not compared
    not run: REASON          (of a console block) nothing is done
"""

import collections
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import jobs

import torchmpi_py as mpi
from torchmpi_py import errors

ROOT = Path(__file__).parents[1]
DAILY = ["README.md", "docs/index.md", "docs/tutorial.md"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BIN = Path(sys.executable).parent
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- ([^>]*?) -->\s*\Z")
NAMED = re.compile(r"\A# (\w+\.py)\n")
STARTS = re.compile(r"\bmpi\.start\(|\binit_process_group\(|\bmpi\.session\(")
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (BIN / "torchmpirun").exists(), reason="no torchmpirun beside Python: install the package"),
]


@dataclass
class Block:
    """A fenced block of a page: its language, its mark without brackets, and where it begins."""

    language: str
    mark: str
    text: str
    place: str


@dataclass
class Run:
    """Commands of a console block, and the lines that the page shows for them."""

    commands: str
    shown: list[str] = field(default_factory=list)
    varies: bool = False


@dataclass
class Program:
    """What a page shows of one program."""

    source: str
    runs: list[Run] = field(default_factory=list)


def blocks(page):
    """The fenced blocks of a page, from its top."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        code = textwrap.dedent(match[3])
        changed = code.startswith(" # ") and re.sub("^(-.*\n|.)", "", code, flags=re.MULTILINE)
        yield Block("python" if changed else match[2], mark[1] if mark else "", changed or code, place)


def script_of(block):
    """Name of the first script of the page's folder that a console block runs, or None."""
    commands = "\n".join(COMMAND.findall(block.text))
    found = re.search(r"(?:torchmpirun|python)\b[^|;#\n]*?(?<![\w/])(\w+\.py)\b", commands)
    return found and found[1]


def name_of(block, following):
    """Name of a program: its first line says it, or the console block that follows."""
    if named := NAMED.match(block.text):
        return named[1]
    assert STARTS.search(block.text), f"{block.place}: neither a program nor marked as a part of one"
    other = next((other for other in following if other.language in {"console", "python"}), None)
    return (other and other.language == "console" and script_of(other)) or "program.py"


def programs(page):
    """Programs of a page by name, in its order."""
    found, all_blocks = {}, list(blocks(page))
    for number, block in enumerate(all_blocks):
        kind, _, argument = block.mark.partition(": ")
        if block.language == "python" and kind == "continues":
            found[argument].source += "\n" + block.text
        elif block.language == "python" and not kind.startswith("fragment of "):
            name = name_of(block, all_blocks[number + 1 :])
            assert name not in found, f"{block.place}: the page has another {name}; mark it as continued, or rename it"
            found[name] = Program(block.text)
        elif block.language == "console" and kind != "not run" and (name := script_of(block)) in found:
            shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
            found[name].runs.append(Run("\n".join(COMMAND.findall(block.text)), shown, kind == "output varies"))
        elif kind.startswith("output of "):
            found[kind.removeprefix("output of ")].runs[-1].shown += block.text.splitlines()
    return found


def lines_of(text):
    """Lines as a bag, without what differs from run to run: process numbers, seconds, what is known of a death."""
    lines = (re.sub(r"process \d+|, [\d.]+ s$", "", line.rstrip()) for line in text)
    lines = (line.replace("was killed by signal 9", "died") for line in lines)
    return collections.Counter(line for line in lines if line.strip(" ^~") and line != "...")


def execute(commands, folder):
    """What the commands of a console block print, errors included. The exit code is that of the last command."""
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "110"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    streams |= {"capture_output": False, "cwd": folder, "env": environment}
    done = jobs.run("bash", "-c", commands, seconds=180, **streams)
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout.replace(f"{folder}/", "")


def differs(run, printed):
    """Whether the page shows other lines than were printed."""
    shown, lines = lines_of(run.shown), lines_of(printed.splitlines())
    return bool(shown - lines) or not ("..." in run.shown or not run.shown or shown == lines)


def _with_programs(page):
    """A parameter of a test; the first pages that people read run in every run."""
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=[pytest.mark.slow] * (name not in DAILY))


@pytest.mark.parametrize(
    "page", [_with_programs(page) for page in PAGES if re.search(r"```(python|diff\n #)", page.read_text())]
)
def test_programs_of_a_page(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, program in programs(page).items():
        (tmp_path / name).write_text(program.source)
        default = f"torchmpirun -n 2 {name}" if STARTS.search(program.source) else f"python {name}"
        for run in program.runs or [Run(default)]:
            printed = execute(run.commands, tmp_path)
            if not run.varies and differs(run, printed):  # of two ranks the other one may be first on a busy machine
                printed = execute(run.commands, tmp_path)
            assert run.varies or not differs(run, printed), f"{run.commands}\nprints\n{printed}"


FRAGMENTS = [block for page in PAGES for block in blocks(page) if block.mark.startswith("fragment of ")]


@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda block: block.place)
def test_fragments_are_in_their_files(block):
    texts = (ROOT / block.mark.removeprefix("fragment of ")).read_text(), block.text
    rest, lines = ((re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()) for text in texts)
    for line in lines:
        assert line in {"", "..."} or line in rest, f"{block.place}: not in the file, or not in this order: {line}"


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    documented = {*re.findall(r"^::: torchmpi_py\.(\w+)$", pages, re.MULTILINE), *vars(errors)}
    assert not {name.removesuffix("_async") for name in mpi.__all__} - documented


HELP = [block for block in blocks(ROOT / "docs/reference/commands.md") if block.language == "console"]


@pytest.mark.parametrize("block", HELP, ids=lambda block: COMMAND.findall(block.text)[0])
def test_commands_have_the_options_of_the_reference(block, tmp_path):
    option = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
    command, _, shown = block.text.partition("\n")
    printed = execute(command.removeprefix("$ "), tmp_path)
    assert set(option.findall(shown)) == set(option.findall(printed)), printed
