"""Ranks die while a network is trained (torchmpirun --elastic): training goes on as if each step were one process's.

What is judged: every sample of an epoch is in exactly one step that counts; one process that takes these steps ends
with the same parameters (so that nothing half reduced has reached them); how long it took from the death until the
survivors went on.
"""

import json
from pathlib import Path

import harness
import pytest
import surviving as program
import torch
from support import networks
from support.jobs import MISSING

from torchmpi_py.engine import DatasetIterator

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(harness.VENDOR != "openmpi", reason=MISSING or f"{harness.VENDOR} has no ULFM"),
]
MOST = {"sample": 30, "backward": 30, "update": 30, "epoch": 3, "half": 99, "meeting": 60, "mpi": 90, "recovery": 1}
GOES_ON_SECONDS = 10.0  # on a loaded machine; the table tells what it was
EPOCHS = 20 if harness.ALL else 3


def drawn_deaths(draw, ranks):
    """One death, or two, one after the other, perhaps while the survivors recover; also of rank 0."""
    victims = draw.sample(range(ranks), draw.choice([1, 1, 2]))
    places = [draw.choice([place for place in MOST if place != "recovery"]), draw.choice(list(MOST))]
    return [f"{v}:{place}:{draw.randint(1, MOST[place])}" for v, place in zip(victims, places, strict=False)]


def every_sample(data):
    return DatasetIterator(data, 1, seed=program.SEED, rank=0, size=1)


def trained(steps):
    """What one process makes of these steps, (epoch, begin, end, ...); every epoch has to be whole."""
    net, data = program.network(), program.dataset()
    optimizer, batches = program.optimizer(net.parameters()), every_sample(data)
    for epoch in range(EPOCHS):
        at = 0
        for _, begin, end, *_ in (step for step in steps if step[0] == epoch):
            assert begin == at, f"epoch {epoch} has no step from {at} on, but from {begin}"
            x, y = data[batches.order(epoch)[begin:end]]
            optimizer.zero_grad()
            program.criterion(net(x), y).backward()
            optimizer.step()
            at = end
        assert at == len(data), f"epoch {epoch} ends at {at} of {len(data)}"
    return net


def check_samples(notes, steps):
    """Each sample of a step that counts was on one rank, and no other sample was."""
    batches = every_sample(program.dataset())
    for epoch, begin, end, size in steps:
        lines = [line for line in notes if line["kind"] == "sample" and line["size"] == size]
        numbers = [n for line in lines if line["at"] == [epoch, begin, end] for n in line["numbers"]]
        wanted = batches.order(epoch)[begin:end].tolist()
        assert sorted(numbers) == sorted(wanted), f"epoch {epoch}, samples {begin} to {end} of {size} ranks"


def check(folder):
    """Seconds from the last thing that the last victim noted until all who were left went on."""
    files = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("rank-*")}
    notes = [line for lines in files.values() for line in lines]
    ended = [lines for lines in files.values() if lines[-1]["kind"] == "end"]
    steps = sorted({(*line["at"], line["size"]) for lines in ended for line in lines if line["kind"] == "update"})
    check_samples(notes, steps)
    net = program.network()
    net.load_state_dict(torch.load(folder / "network"))
    torch.testing.assert_close(networks.flat(net), networks.flat(trained(steps)), rtol=0, atol=1e-9)
    if len(ended) == len(files):
        return 0.0  # no rank came to the place of its death so often
    last_sign = max(path.stat().st_mtime for path, lines in files.items() if lines[-1]["kind"] != "end")
    return max(line["time"] for lines in ended for line in lines if line["kind"] == "recovery") - last_sign


def survived(tmp_path, index):
    draw = harness.seeded(f"survive {index}")
    ranks = draw.choice([3, 4, 4, 5]) if harness.ALL else 3
    deaths, folder = drawn_deaths(draw, ranks), tmp_path / str(index)
    folder.mkdir()
    line = harness.command(ranks, Path(program.__file__), str(folder), str(EPOCHS), str(index % 2), *deaths)
    line.insert(line.index("-n"), "--elastic")
    outcome = harness.run(f"survive {index} {ranks} {deaths}", line, within_seconds=120)
    outcome.expect(outcome.code == 0, f"the exit code is {outcome.code}")
    return outcome, folder


def test_training_goes_on(tmp_path, judge):
    torch.set_num_threads(1)
    results = harness.at_once(2, range(harness.count(1, 40)), lambda index: survived(tmp_path, index))
    for outcome, folder in results:
        try:
            outcome.seconds = check(folder)
            outcome.expect(outcome.seconds < GOES_ON_SECONDS, f"it went on after {outcome.seconds:.1f} s")
        except (AssertionError, ValueError, OSError) as problem:
            outcome.expect(False, repr(problem))
    died = [outcome for outcome, _ in results if outcome.seconds > 0 or outcome.problems]
    judge("death, until training goes on", died)
    assert len(died) > len(results) / 2


@pytest.mark.slow
def test_a_rank_dies_before_another_has_read_its_tensor():
    """What the dead rank had posted of the last barrier arrives: the reader must not take its call for complete."""
    line = harness.command(3, Path(__file__).with_name("reading.py"))
    line.insert(line.index("-n"), "--elastic")
    outcome = harness.run("dead before it is read", line)
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    outcome.expect("rank 0: RankDied, allgather" in outcome.output, outcome.output)
    assert not outcome.problems, outcome.describe()
