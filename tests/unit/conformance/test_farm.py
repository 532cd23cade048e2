"""The executor of farms, on a cluster of two nodes in this machine. The workers are stand-ins that compute nothing."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from emutpu.conformance import farm, pool, runner
from emutpu.conformance.history import History
from emutpu.conformance.pool import Limits, Task
from tests.unit.conformance.test_running import STAND_IN

PLENTY = Limits(60, 2**31)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Workers that answer at once."""
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", STAND_IN.replace("os.getpid()", "os.getppid()")])


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one processor."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def answers_of(names, limits=PLENTY, finished=lambda answer: None):
    """Answers by program, each of which came once."""
    found = []
    farm.work_off(
        [Task(name, "strict") for name in names],
        jobs=8,
        environment={"STAND_IN_SLOW": "1"},
        limits=limits,
        finished=lambda answer: (found.append(answer), finished(answer)),
    )
    assert len(found) == len(names)
    return {answer["program"]: answer for answer in found}


def test_a_run_on_two_nodes(cluster, tmp_path):
    """The whole smoke suite: every answer once, from both nodes, in the history; a dead or late worker is one answer."""
    plan = runner.plan_of("smoke", ["strict"], "v5e", (1, 1), None)
    states = []
    number = runner.run(
        plan, tmp_path, jobs=8, limits=PLENTY, resume=False, progress=states.append, executor=runner.RAY
    )
    assert [state.done for state in states] == list(range(1, 41))
    with History(tmp_path / runner.DATABASE) as history:
        assert history.runs()[0].finished
        assert len({answer["worker"] for answer in history.answers(number)}) == 2
    found = answers_of(["a", "dies", "spins", "b"], Limits(0.5, 2**31))
    assert {name: answer["outcome"] for name, answer in found.items()} == {
        "a": "pass",
        "dies": "crash",
        "spins": "timeout",
        "b": "pass",
    }
    assert "last words" in found["dies"]["error"]


def test_a_lost_node_is_no_finding(cluster):
    """A node that goes away in the middle: its task is given to another node."""
    lost = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    threading.Timer(2.0, lambda: cluster.remove_node(lost)).start()
    started = time.monotonic()
    found = answers_of([f"p{n}" for n in range(30)])
    assert time.monotonic() - started > 2
    assert {answer["outcome"] for answer in found.values()} == {"pass"}


def test_an_error_in_the_callers_hands_ends_the_work(cluster):
    """It is raised, and no place goes on."""

    def broken(answer):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        answers_of(["a", "b", "c"], finished=broken)


def test_without_ray(monkeypatch):
    """The command says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(farm.NoRay, match=r"pip install 'emutpu\[ray\]'"):
        farm.check()
