"""Tables in Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns; columns of numbers are aligned on the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(c.replace(".", "", 1).replace("-", "", 1).isdigit() or c == "-" for c in x[1:]) for x in columns]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, is_number, strict=True)]
    pads = [str.rjust if right else str.ljust for right in is_number]
    padded = [[pads[n](cell, widths[n]) for n, cell in enumerate(row)] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
