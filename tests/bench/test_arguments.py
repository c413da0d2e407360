import pytest

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.compare import sizes_of


def test_options():
    options = parse(["compare", "--sizes", "4:1K:16x", "--dtype", "bfloat16", "--flavours", "mpi,ring"])
    assert options.sizes == [4, 64, 1024]
    assert options.dtype == "bfloat16"
    assert options.flavours == ["mpi", "ring"]
    assert (options.verb, options.op, options.buffers, options.verify) == ("allreduce", "sum", "both", True)
    assert parse(["step", "--layers", "8,4,2"]).layers == [8, 4, 2]
    for device, largest in (("cpu", 64 << 20), ("cuda", 1 << 30)):
        sizes = sizes_of(parse(["compare", "--device", device]))
        assert (sizes[0], sizes[-1]) == (4, largest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"run \| compare \| step .* timeline"),
        ("run --verb foo", "'foo'.*allreduce.*scatter"),
        ("run --op foo", "'foo'.*sum.*lor"),
        ("run --dtype foo", "'foo'.*float32.*bool"),
        ("run --sizes 4Q", "'4Q'.*64K"),
        ("run --seconds 0", "expected a finite number above 0, found '0'"),
        ("step --layers 4", "'4'.*two widths"),
        ("step --ways average,shared", "'shared' is not a group of trainers; choose from average, sharded, compressed"),
        ("step --steps -1", "'-1'"),
        ("timeline", "DIR"),
    ],
)
def test_a_mistake_is_named_with_what_is_known(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words.split())
