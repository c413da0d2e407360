"""The watch between hundreds of nodes on one machine: two hubs as they are, and leaders that speak the links alone.

``python benchmarks/scale/many_leaders.py 512`` prints what it measures as JSON. The hubs are processes with torch and
the package, each of which runs ``NodeWatch``. The other leaders are forks of this process, which imports neither torch
nor numpy: they connect to the hubs, answer their questions, and claim a report when they are told to. Each stands for a
node of 64 ranks. Nothing here crosses a network.
"""

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from torchmpi_py.launch.job import die_with_parent
from torchmpi_py.watch import node_links
from torchmpi_py.watch.node_links import Nodes

RANKS = 64
ELSEWHERE = 2 * RANKS + 7
TOKEN = b"token"
CONNECT_AGAIN_SECONDS, TURN_SECONDS = 2.0, 1.0
WAITING, PRINTED, HELD, NO_ANSWER = range(4)
STACK = "".join(f'    File "train.py", line {line}, in step_{line}\n      loss.backward()\n' for line in range(8))
LATE = 2  # CLAIMED_LATE


def nodes_of(mine, num_nodes, ports):
    """The nodes, as each leader knows them; node n has the ranks from n on, in steps of RANKS."""
    order = [number * RANKS for number in range(num_nodes)]
    hubs = {node: ("127.0.0.1", port) for node, port in zip(order, ports, strict=False)}
    ranks = {node: range(node, node + RANKS) for node in order}
    return Nodes(mine, {node: f"host{node // RANKS}" for node in order}, ranks, hubs, TOKEN)


def part_of(node):
    """A node's part of a report, as ``job_reports.Part``: all ranks wait, except one rank of the third node."""
    waiting = [rank for rank in range(node, node + RANKS) if rank != ELSEWHERE]
    rows = [[waiting, f"{len(waiting)} ranks", f"in allreduce for {node % 97 / 10} s, called at train.py:7\n{STACK}"]]
    if len(waiting) < RANKS:
        rows.append([[ELSEWHERE], f"rank {ELSEWHERE} (process 1)", "in barrier for 1.0 s, called at train.py:9"])
    return [rows, "the last operations of each rank: /tmp/torchmpi_py-hang"]


def answer(question, node):
    """A leader's answer to a hub."""
    if question["what"] != "rows":
        return part_of(node)
    row = [1, "0-99", node, True, [(1 << 40) + 5]]  # generation, ranks, delegate, whether it waits, fingerprints
    return [[row], [], [f"rank {node + index} (process 1): last called allreduce at train.py:7" for index in range(8)]]


def lead(nodes, outcomes, index, go):
    """The life of a leader: it serves its links, and claims a report when ``go`` says so."""
    os.read(go, 1)
    links, attempted = {}, dict.fromkeys(nodes.hubs, 0.0)
    while True:
        connect(nodes, links, attempted)
        poll = select.poll()
        if outcomes[index] == WAITING:
            poll.register(go, select.POLLIN)
        for link in links.values():
            poll.register(link, select.POLLIN | (select.POLLOUT if link.has_output else 0))
        ready = dict(poll.poll(TURN_SECONDS * 1000))
        if go in ready:
            outcomes[index] = NO_ANSWER
            os.read(go, 1)
            threading.Thread(target=claim, args=(nodes, outcomes, index), daemon=True).start()
        for hub, link in list(links.items()):
            try:
                if link.fileno() in ready:
                    link.flush()
                    serve(link, link.receive(), nodes.mine)
                link.tend(time.monotonic())
            except (OSError, ValueError):
                links.pop(hub).close()


def connect(nodes, links, attempted):
    """Connect to the hubs to which there is no link, as ``NodeWatch`` does."""
    for hub in nodes.hubs:
        if hub in links or time.monotonic() - attempted[hub] < CONNECT_AGAIN_SECONDS:
            continue
        is_again, attempted[hub] = attempted[hub] > 0, time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            links[hub] = node_links.connect(nodes, hub, nodes.mine, is_again=is_again)
            serve(links[hub], links[hub].unread, nodes.mine)


def serve(link, messages, node):
    """Answer the questions of a hub."""
    for message in messages:
        if "ask" in message:
            link.send({"answer": message["ask"], "value": answer(message, node)})


def claim(nodes, outcomes, index):
    """As a late rank of the node does."""
    node_links.current = nodes
    about = {"claim": LATE, "node": nodes.mine, "heading": f"report of rank {nodes.mine}", "part": part_of(nodes.mine)}
    found = node_links.ask({**about, "position": None, "called": "allreduce", "ends": False}, 30.0)
    if found is not None:
        outcomes[index] = PRINTED if found["claimed"] == "printed" else HELD


def usage(process_id):
    """Resident and proportional memory in MB, and the number of descriptors of a process."""
    memory = Path(f"/proc/{process_id}/smaps_rollup").read_text().split()
    resident, proportional = (int(memory[memory.index(name) + 1]) / 1024 for name in ("Rss:", "Pss:"))
    return {"rss_mb": resident, "pss_mb": proportional, "descriptors": len(os.listdir(f"/proc/{process_id}/fd"))}


class OneRank:
    """A communicator of one rank that shares no memory."""

    rank, size = 0, 1

    def allgather(self, x):
        """What all ranks give."""
        return [x]

    def Barrier(self):  # noqa: N802 - as in mpi4py
        """Nothing to wait for."""


def hub(number, num_nodes):
    """The life of a hub: a line of JSON for each step, on stdout."""
    from torchmpi_py.core import config, status_board
    from torchmpi_py.core.channels import Place
    from torchmpi_py.watch import node_watch

    def tell(**about):
        print(json.dumps({"at": time.monotonic(), **about}), flush=True)

    listener = node_links._listen("127.0.0.1", num_nodes)
    tell(port=listener.getsockname()[1])
    nodes = nodes_of(number * RANKS, num_nodes, json.loads(sys.stdin.readline()))
    board = status_board.Board(OneRank(), [Place(0, 0)], nodes.mine)
    node_watch.abort.abort = lambda code, why: tell(ended=why)
    tell(**usage(os.getpid()))
    watch = node_watch.NodeWatch(board, nodes, listener, config.Tuning(), lambda report: tell(report=report))
    while len(watch._links) < num_nodes - 1:
        time.sleep(0.005)
    tell(connected=len(watch._links))
    while number == 0 and len(watch._briefs) < num_nodes:  # the first comparison
        time.sleep(0.005)
    sys.stdin.readline()
    tell(**usage(os.getpid()), links=len(watch._links))
    sys.stdin.readline()


class Hub:
    """A hub's process."""

    def __init__(self, number, num_nodes):
        command = [sys.executable, __file__, str(num_nodes), "hub", str(number)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, **pipes)

    def say(self, text=""):
        """Send the hub a line."""
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self, key):
        """The next line with this key."""
        for line in self.process.stdout:
            if key in (told := json.loads(line)):
                return told
        raise RuntimeError(f"the hub has ended without {key}")


def measure(num_nodes):
    """Start hubs and leaders; what was measured."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * num_nodes + 500)), hard))
    hubs = [Hub(number, num_nodes) for number in range(2)]
    ports = [each.hear("port")["port"] for each in hubs]
    for each in hubs:
        each.say(json.dumps(ports))
    before = [each.hear("rss_mb") for each in hubs]
    outcomes, gates, leaders = mmap.mmap(-1, num_nodes), [], []
    try:
        for index in range(2, num_nodes):
            gate, opened = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    die_with_parent()
                    lead(nodes_of(index * RANKS, num_nodes, ports), outcomes, index, gate)
                finally:
                    os._exit(1)
            os.close(gate)
            gates.append(opened)
            leaders.append(child)
        figures = {"nodes": num_nodes, "ranks": num_nodes * RANKS}
        # 1. All connect at once.
        begun = time.monotonic()
        for gate in gates:
            os.write(gate, b"x")
        connected = [each.hear("connected")["at"] - begun for each in hubs]
        figures["connected_after_s"] = max(connected)
        time.sleep(3.0)  # some comparisons
        for each in hubs:
            each.say()
        after = [each.hear("links") for each in hubs]
        figures["hub"] = {name: after[0][name] for name in ("rss_mb", "pss_mb", "descriptors", "links")}
        figures["hub_grew_mb"] = after[0]["pss_mb"] - before[0]["pss_mb"]
        figures["leader"] = usage(leaders[0])
        # 2. One rank of each node is late, at the same time.
        begun = time.monotonic()
        for gate in gates:
            os.write(gate, b"x")
        told = hubs[0].hear("report")
        figures["late_report_after_s"], figures["late_report"] = told["at"] - begun, told["report"]
        until = time.monotonic() + 20
        while time.monotonic() < until and any(
            outcomes[index] in (WAITING, NO_ANSWER) for index in range(2, num_nodes)
        ):
            time.sleep(0.01)
        figures["claims"] = {
            name: outcomes[2:].count(bytes([code]))
            for name, code in (("printed", PRINTED), ("held", HELD), ("no answer", NO_ANSWER))
        }
        # 3. One leader is killed.
        os.kill(leaders[-1], signal.SIGKILL)
        begun = time.monotonic()
        told = hubs[0].hear("report")
        figures["death_report_after_s"], figures["death_report"] = told["at"] - begun, told["report"]
        return figures
    finally:
        for child in leaders:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for each in hubs:
            each.process.kill()
            each.process.communicate()


if __name__ == "__main__":
    if sys.argv[2:3] == ["hub"]:
        hub(int(sys.argv[3]), int(sys.argv[1]))
    else:
        print(json.dumps(measure(int(sys.argv[1])), indent=2))
