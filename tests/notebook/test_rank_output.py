"""Lines of several ranks become one text."""

import time

import pytest

from torchmpi_py.notebook import rank_output
from torchmpi_py.notebook.rank_output import OutputMerger, name_ranks, ranks_as_text


class Screen:
    """What was written, and a merger that writes it."""

    def __init__(self, num_ranks):
        self.written = []
        self.merger = OutputMerger(num_ranks, lambda stream, text: self.written.append((stream, text)))

    def end(self):
        self.merger.flush(is_end=True)
        return "".join(text for _, text in self.written)


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([3, 1], "1,3"), ([0, 1, 5, 6, 7, 9], "0-1,5-7,9")])
def test_ranks_as_text(ranks, text):
    assert ranks_as_text(ranks) == text
    assert name_ranks(ranks) == f"rank{'s' if len(ranks) > 1 else ''} {text}"


def test_equal_lines_are_one_and_others_have_their_rank():
    screen = Screen(4)
    for rank in (2, 0, 3, 1):
        screen.merger.add(rank, "stdout", f"same\n{'odd' if rank % 2 else f'own {rank}'}\n")
    assert screen.end() == "[0-3] same\nown 0\n[1,3] odd\n[2] own 2\n"


def test_a_line_of_all_ranks_does_not_wait_and_one_of_some_a_moment(monkeypatch):
    screen, now = Screen(2), time.monotonic()
    monkeypatch.setattr(rank_output.time, "monotonic", lambda: now)
    screen.merger.add(1, "stdout", "both\nrank 1 alone\n")
    screen.merger.flush()
    assert not screen.written
    screen.merger.add(0, "stdout", "both\n")
    screen.merger.flush()
    assert screen.written == [("stdout", "[0-1] both\n")]
    now += rank_output.HOLD_SECONDS + 0.01
    screen.merger.flush()
    assert screen.written[1:] == [("stdout", "[1] rank 1 alone\n")]


def test_lines_come_in_pieces_and_a_rank_keeps_its_order():
    screen = Screen(2)
    for rank in (0, 1):
        for piece in ("a", "bc\n", "", "\rstep 1\rstep 2\r\n", f"last of {rank}"):
            screen.merger.add(rank, "stdout", piece)
    assert screen.end() == "[0-1] abc\n[0-1] \r[0-1] step 1\r[0-1] step 2\r\nlast of 0\n[1] last of 1\n"


def test_the_streams_are_different_and_a_block_stays_whole():
    screen = Screen(2)
    screen.merger.add(0, "stdout", "word\n")
    screen.merger.add(1, "stderr", "word\n")
    for rank in (0, 1):
        screen.merger.add_block(rank, "stdout", f"tensor([[{rank}],\n        [2]])\n")
    screen.end()
    assert screen.written == [
        ("stdout", "word\n"),
        ("stderr", "[1] word\n"),
        ("stdout", "tensor([[0],\n        [2]])\n"),
        ("stdout", "[1] tensor([[1],\n[1]         [2]])\n"),
    ]


@pytest.mark.timeout(25)
@pytest.mark.parametrize(
    "pieces",
    [
        [f"{list(range(20000))}", "\n"],
        ["." * 77 + "\r\n"] * 4000,
        ["."] * 20000,
        [f"\r{percent}%" for percent in range(20000)],
        ["\n"] * 20000,
        ["\r" * 20000, "\n" * 20000],
        [" " * 100 + "end\n..."] * 2000,
    ],
    ids=["long line", "long lines", "dots", "progress bar", "short lines", "line ends", "unfinished lines"],
)
def test_the_work_grows_with_the_output_and_no_faster(pieces):
    """Of two ranks that write the same; work that grew with the square of the output took minutes."""
    screen, begin = Screen(2), time.process_time()
    for piece in pieces:
        for rank in (1, 0):
            screen.merger.add(rank, "stdout", piece)
        screen.merger.flush()
    text = "".join(pieces)
    written = screen.end()
    assert time.process_time() - begin < 10
    assert written.replace("[0-1] ", "") == text + "\n" * (not text.endswith(("\r", "\n")))
