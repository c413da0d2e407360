"""The page of a timeline: its arithmetic on made-up records, and the pages, and traces, of real jobs."""

import html.parser
import json
import re
import signal
import subprocess

import pytest
from support import jobs

from torchmpi_py.bench import __main__ as bench, timeline, timeline_calls
from torchmpi_py.bench.timeline_calls import COMPLETE, UNKNOWN, JobCalls, RankCalls, RecordedCall, meet
from torchmpi_py.core.status_board import NUM_RECORDS
from torchmpi_py.watch import kept_boards

PROGRAM = """
import os, sys, time, torch
import torchmpi_py as mpi
mpi.start()
how = sys.argv[1]
for turn in range(1500 if how == "die" else 5):
    time.sleep(0.02 * mpi.rank() * (how == ""))
    mpi.allreduce(torch.ones(1000), flavour="mpi")
mpi.broadcast(torch.ones(7, dtype=torch.float64), flavour="ring")
mpi.allreduce_async(torch.ones(1 << 18), flavour="ring").wait()
mpi.barrier()
if how == "hang" and mpi.rank() == 0:
    open("through", "w").close()
if how == "hang" and mpi.rank() == 1:
    while not os.path.exists("through"):
        time.sleep(0.01)
    print("rank 1 sleeps", flush=True)
    time.sleep(300)
if how == "die" and mpi.rank() == 1:
    os.kill(os.getpid(), 9)
if how == "fail" and mpi.rank() == 1:
    raise RuntimeError("boom")
if how:
    mpi.allreduce(torch.ones(3))
"""


def call(begin, end, key=("0.0", 1), state=COMPLETE, num_bytes=4000):
    return RecordedCall(
        "allreduce mpi torch.float32 sum", "a.py:3 in f", "global", num_bytes, begin, begin, end, state, key
    )


def job_of(*ranks, num_before=0):
    made = [RankCalls(rank, "vm", "", list(calls), num_before) for rank, calls in enumerate(ranks)]
    return JobCalls(made, {"0.0": range(len(ranks))}, len(ranks), "torch 9", "a story")


def test_waits_end_when_the_last_rank_begins():
    job = job_of([call(1000, 9000)], [call(5000, 9500)], [call(2000, 3000)])
    meet(job)
    calls = [rank.calls[0] for rank in job.ranks]
    assert [each.wait_us for each in calls] == [4, 0, UNKNOWN], "as a broadcast's root, which may go on alone"
    assert {each.transfer_ns for each in calls} == {4500}
    assert [rank.num_last for rank in job.ranks] == [0, 1, 0]
    assert [rank.kept_others_us for rank in job.ranks] == [0, 4, 0]


def test_a_rank_that_has_not_come_is_known_from_one_whose_record_is_lost():
    late = job_of([call(1000, 9000, state=timeline_calls.UNDER_WAY)], [])
    meet(late)
    assert late.ranks[0].calls[0].wait_us == timeline_calls.MISSING
    lost = job_of([call(1000, 9000)], [call(8000, 9000, key=("0.0", 2))])
    meet(lost)
    assert [rank.calls[0].wait_us for rank in lost.ranks] == [UNKNOWN, UNKNOWN]
    elsewhere = job_of([call(1000, 9000)])._replace(members={"0.0": [0, 1]})
    meet(elsewhere)
    assert elsewhere.ranks[0].calls[0].wait_us == UNKNOWN


def test_clocks_of_other_hosts_are_interpolated():
    clock = [{"at_ns": 1000, "offset_ns": 100}, {"at_ns": 3000, "offset_ns": 300}]
    assert [kept_boards._by_rank_0(time, clock) for time in (1000, 2000, 3000)] == [900, 1800, 2700]
    assert kept_boards._by_rank_0(5000, clock[:1]) == 4900


def test_text_of_a_program_ends_no_script_and_no_tag():
    bad = call(0, 1000)
    bad.text, bad.site = "allreduce </script><b>", "</script>.py:1"
    about = {"command": "torchmpirun '<i>' @DATA@", "exit_code": 1, "reason": "<u>", "ended_ns": 10**18}
    read = Page(timeline.page(job_of([bad]), about))
    assert {"b", "i", "u"} & set(read.tags) == set()
    assert read.title == "Timeline of torchmpirun '<i>' @DATA@"
    assert bad.site in read.data["texts"]


class Page(html.parser.HTMLParser):
    """A page's tags, title and data; its open tags are all closed."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.open, self.title, self.json, self.words = text, [], [], "", "", ""
        self.feed(text)
        self.close()
        assert self.open == []
        self.data = json.loads(self.json)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, value in attributes if value != "data:,"}, "nothing is fetched"
        if tag not in ("meta", "link", "br"):
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open[-1:] == [("title", None)]:
            self.title += data
        if self.open[-1:] == [("script", "data")]:
            self.json += data
        elif "script" not in dict(self.open):
            self.words += data

    def operations(self, number):
        """(verb, bytes, state) of a rank's operations, but for those of start and stop."""
        texts, (rank,) = self.data["texts"], [each for each in self.data["ranks"] if each["rank"] == number]
        found = [(texts[each[0]].split()[0], each[3], self.data["states"][each[4]]) for each in rank["calls"]]
        return [each for each in found if each[0] in ("allreduce", "broadcast", "barrier")]


def run(folder, num_ranks, how, *options, timeline="t.html", **variables):
    jobs.write(folder, PROGRAM, "a.py")
    keywords = {"cwd": folder, "stdin": subprocess.DEVNULL, "env": {"TORCHMPI_DUMP_DIR": str(folder)} | variables}
    return jobs.torchmpirun("-n", num_ranks, "--timeline", timeline, *options, "a.py", how, **keywords)


EXPECTED = [
    *[("allreduce", 4000, "complete")] * 5,
    ("broadcast", 56, "complete"),
    ("allreduce", 1 << 20, "complete"),
    ("barrier", 0, "complete"),
]


def traced(folder):
    """The traces of --profile, by rank, and the operations of each, whose times are all on one axis."""
    traces = [json.loads(path.read_text()) for path in sorted((folder / "p").iterdir())]
    assert [trace["torchmpi"]["rank"] for trace in traces] == [*range(len(traces))]
    assert len({trace["baseTimeNanoseconds"] for trace in traces}) == 1
    return traces, [[each for each in trace["traceEvents"] if each.get("cat") == "torchmpi"] for trace in traces]


@jobs.needs_mpi
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_page_and_the_traces_of_a_job(tmp_path, num_ranks):
    done = run(tmp_path, num_ranks, "", "--env", "TOKEN=confided", "--env=KEY=a=confided", "--profile", "p")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "p", "t.html"]
    traces, ranks = traced(tmp_path)
    assert len(traces) == num_ranks
    assert all(any(event.get("cat") == "cpu_op" for event in trace["traceEvents"]) for trace in traces)
    for made in ranks:
        assert [(event["name"], event["args"]["flavour"], event["args"]["bytes"]) for event in made[:7]] == [
            *[("allreduce", "mpi", 4000)] * 5,
            ("broadcast", "ring", 56),
            ("allreduce", "ring", 1 << 20),
        ]
    for same in zip(*(made[:5] for made in ranks), strict=True):  # they meet in it
        assert max(event["ts"] for event in same) < min(event["ts"] + event["dur"] for event in same)
    page = Page((tmp_path / "t.html").read_text())
    assert re.findall("https?:|//[a-z]", page.text) == []
    assert [rank["ended"] for rank in page.data["ranks"]] == ["with mpi.stop()"] * num_ranks
    for rank in range(num_ranks):
        assert page.operations(rank) == EXPECTED
    # The same operation has the same number on all ranks, and begins before it has ended on any.
    for same in zip(*([each for each in rank["calls"] if each[-1] >= 0] for rank in page.data["ranks"]), strict=True):
        assert len({each[-1] for each in same}) == 1
        if not page.data["texts"][same[0][0]].startswith("broadcast"):  # whose root may be done before the others come
            assert max(each[5] for each in same) <= min(each[5] + each[6] for each in same) + 0.2
        assert 0 in [each[8] for each in same], "the last rank does not wait"
    for words in (f"{num_ranks} on", "exit code 0", "--env TOKEN=... --env=KEY=... --profile p a.py"):
        assert words in page.words
    assert "confided" not in page.text
    assert "Why the job ended" not in page.words


@pytest.mark.slow
@jobs.needs_mpi
def test_the_last_records_of_a_rank_that_is_killed(tmp_path):
    """The page is bounded, whatever the job."""
    assert run(tmp_path, 2, "die").returncode in (1, 137), "the watchdog of rank 0 may end the job first, or MPI"
    page = Page((tmp_path / "t.html").read_text())
    operations = page.operations(1)
    assert operations[-8:] == EXPECTED
    assert {*operations[:-8]} == {EXPECTED[0]}
    assert [len(rank["calls"]) for rank in page.data["ranks"]] == [NUM_RECORDS] * 2
    assert all(rank["dropped"] > 1500 - NUM_RECORDS for rank in page.data["ranks"])
    assert len(page.text) < 40_000 + 2 * NUM_RECORDS * 70
    assert f"the last {NUM_RECORDS} of " in page.words
    assert re.search(r"rank 1 \(process \d+\) was killed by signal 9", page.words)


@pytest.mark.slow
@jobs.needs_mpi
def test_a_rank_that_fails_leaves_its_trace(tmp_path):
    done = run(tmp_path, 2, "fail", "--profile", "p")
    assert (done.returncode, done.stderr.count("RuntimeError: boom")) == (1, 1)
    trace = json.loads((tmp_path / "p" / "rank-1.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "torchmpi"]
    assert names[:7] == [each[0] for each in EXPECTED[:7]]
    assert len(trace["torchmpi"]["clock"]) == 1


@pytest.mark.slow
@jobs.needs_mpi
def test_the_last_records_of_a_job_that_hangs(tmp_path, capsys):
    """On the page of --timeline, and on one of the dumps, which such a job leaves anyway."""
    assert run(tmp_path, 3, "hang", TORCHMPI_DEADLINE="10").returncode == 1
    (folder,) = tmp_path.glob("torchmpi_py-hang-*")
    assert bench.main(["timeline", str(folder)]) == 0
    assert f"wrote {folder / 'timeline.html'}; open it in a browser" in capsys.readouterr().out
    pages = [Page(path.read_text()) for path in (tmp_path / "t.html", folder / "timeline.html")]
    for page in pages:
        for rank in (0, 2):
            assert page.operations(rank) == [*EXPECTED, ("allreduce", 12, "under way")]
        assert page.operations(1) == EXPECTED
    assert re.search(r"rank 1 \(process \d+\) did not call .*; rank . reported it", pages[0].words)


@pytest.mark.slow
@jobs.needs_mpi
def test_the_last_records_of_a_job_that_is_ended_from_outside(tmp_path):
    jobs.write(tmp_path, PROGRAM, "a.py")
    command = [*jobs.TORCHMPIRUN, "-n", "2", "--timeline", "t.html", "--grace", "0", "a.py", "hang"]
    with jobs.start(*command, cwd=tmp_path, stderr=subprocess.DEVNULL) as job:
        assert job.stdout.readline() == "rank 1 sleeps\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(200) == 143
    page = Page((tmp_path / "t.html").read_text())
    assert "the job was ended by signal 15" in page.words
    assert page.operations(1) == EXPECTED
    assert page.operations(0)[:8] == EXPECTED


def test_a_folder_without_records_and_a_board_of_another_version_are_refused(tmp_path, capsys):
    about = {"start_ns": 1, "num_ranks": 1, "host": "h", "versions": "", "clock": [{"at_ns": 0, "offset_ns": 0}]}
    assert bench.main(["timeline", str(tmp_path)]) == 2
    assert "has no dumps" in capsys.readouterr().err
    (tmp_path / "node-0.json").write_text(json.dumps(about))
    (tmp_path / "node-0.board").write_bytes(bytes(kept_boards.PART_BYTES))
    assert bench.main(["timeline", str(tmp_path)]) == 2
    assert "cannot read the records of the ranks in" in capsys.readouterr().err


@jobs.needs_mpi
def test_a_page_that_cannot_be_written_is_refused_before_the_job(tmp_path):
    (tmp_path / "folder").mkdir()
    for path, problem in (
        ("folder", r"expected a file, found a folder; use a file in it: .*/folder/timeline.html"),
        ("a.py/t.html", r"there is no folder .*/a.py; create it"),
        ("/proc/t.html", r"cannot write this file: .*; use another file"),
    ):
        done = run(tmp_path, 2, "", timeline=path)
        assert done.returncode == 2
        assert re.fullmatch(f"torchmpirun: --timeline {path}: {problem}.*\n", done.stderr)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.py", "folder"]


@pytest.mark.slow
@jobs.needs_mpi
@pytest.mark.parametrize(("num_restarts", "whose"), [(0, ""), (1, "the first start"), (2, "restart 1")])
def test_records_of_an_earlier_start_are_not_taken_for_those_of_the_last(tmp_path, num_restarts, whose):
    jobs.write(
        tmp_path,
        f"""
        import os, sys, time, torch
        import torchmpi_py as mpi
        restart = os.environ["TORCHMPIRUN_RESTART"]
        if restart == "{num_restarts}" != "0":
            sys.exit(3)
        mpi.start()
        mpi.allreduce(torch.ones(1 + int(restart)))
        mpi.barrier()
        if mpi.rank() == 0:
            sys.exit(4)
        time.sleep(100)
        """,
        "b.py",
    )
    done = jobs.torchmpirun("-n", 2, "--max-restarts", num_restarts, "--timeline", "t.html", "b.py", cwd=tmp_path)
    assert done.returncode == (3 if num_restarts else 4), done.stderr
    page = Page((tmp_path / "t.html").read_text())
    assert page.operations(1) == [("allreduce", 4 * max(1, num_restarts), "complete"), ("barrier", 0, "complete")]
    records = f"from {whose}, because restart {num_restarts} did not complete mpi.start()" if whose else ""
    assert ("did not complete" in page.words, records in page.words) == (bool(whose), True)
    assert f"with exit code {done.returncode}" in page.words


@jobs.needs_mpi
def test_a_job_without_records_says_that_there_is_no_page(tmp_path):
    jobs.write(tmp_path, "print('nothing')", "b.py")
    done = jobs.torchmpirun("-n", 1, "--timeline", "t.html", "b.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "nothing\n")
    assert "cannot write the page for --timeline" in done.stderr
    assert "no rank called mpi.start()" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.py"]
