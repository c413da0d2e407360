import pytest

from torchmpi_py.bench.buffers import format_size, parse_size, parse_sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4", 4), ("64K", 64 << 10), ("1m", 1 << 20), ("2G", 2 << 30), ("1.5K", 1536), ("480KiB", 480 << 10), ("8B", 8)],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "4Q", "-4", "K", "4 4", "1e3", "0.1"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ValueError, match="write bytes as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4,1K", [4, 1024]),
        ("1K,4,1024", [4, 1024]),
        ("4:64:4x", [4, 16, 64]),
        ("4:100:4x", [4, 16, 64, 100]),
        ("1K:4K", [1024, 2048, 4096]),
        ("8:8", [8]),
        ("4:16,1M", [4, 8, 16, 1 << 20]),
    ],
)
def test_lists_and_ranges(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["4:", "16:4", "4:16:1x", "4:16:4", "4:16:4x:2", "4,,8"])
def test_what_is_no_range_is_named(text):
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(4, "4 B"), (65536, "64 KiB"), (1.5 * (1 << 30), "1.5 GiB"), (4096 << 30, "4096 GiB")]
)
def test_format(num_bytes, text):
    assert format_size(num_bytes) == text
