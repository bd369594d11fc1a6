"""A peer's process: what it is asked and answers, how it is stopped, and how it may fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pretend_peer
from outrider.bench.peers.environment import Child, PeerFailedError
from waiting import wait_until


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or state(pid) == "Z"


def test_a_completion_has_its_tokens_and_seconds(tmp_path: Path) -> None:
    child = pretend_peer.opened(tmp_path, pretend_peer.COUNTS)
    found = child.complete([[1, 2], [7]], 20, None)
    assert found.tokens == [list(range(3, 23)), list(range(8, 28))]
    assert 0.04 <= found.seconds <= child.age
    child.close()
    assert "chatter" in child.log.read_text()  # what an engine prints goes there, not among the answers
    assert child.process.returncode == 0


def test_a_paused_process_is_stopped_and_resumes(tmp_path: Path) -> None:
    child = pretend_peer.opened(tmp_path, pretend_peer.COUNTS)
    child.pause()
    wait_until(lambda: state(child.process.pid) == "T")
    child.resume()
    assert child.complete([[1]], 2, None).tokens == [[2, 3]]
    child.pause()
    child.close()  # also from there
    assert gone(child.process.pid)


def resident(child: Child) -> int:
    found = child.memory()
    assert found is not None
    return found["resident"]


def test_memory_includes_child_processes(tmp_path: Path) -> None:
    alone = pretend_peer.opened(tmp_path, pretend_peer.COUNTS)
    command = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    helper = f"        import subprocess, sys\n        self.helper = {command}\n"
    source = pretend_peer.COUNTS.replace("        self.turns = 0\n", helper + "        self.turns = 0\n")
    other = pretend_peer.opened(tmp_path, source)
    try:
        one = resident(alone)
        assert 5_000_000 < one <= alone.memory()["peak"]  # type: ignore[index]
        wait_until(lambda: resident(other) > one + 3_000_000)
    finally:
        alone.close()
        other.close()
    wait_until(lambda: other.memory() is None)  # nothing is left of it


def test_the_error_of_a_dead_peer_names_signal_and_last_output(tmp_path: Path) -> None:
    child = pretend_peer.opened(tmp_path, pretend_peer.DIES)
    child.complete([[1]], 1, None)
    with pytest.raises(
        PeerFailedError, match=r"ended with signal SIGILL: illegal instruction, it seems \(see `.*it.log"
    ):
        child.complete([[1]], 2, None)
    with pytest.raises(PeerFailedError, match="SIGILL"):  # and again on the closed pipe
        child.complete([[1]], 2, None)
    child.close()


def test_an_exception_in_a_worker_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailedError, match=r"^no such layer \(see"):
        pretend_peer.opened(tmp_path, pretend_peer.COMPLAINS)
    assert "Traceback" in (tmp_path / "logs" / "it.log").read_text()


def test_a_missing_engine_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailedError, match="No module named 'no_such_engine'"):
        pretend_peer.opened(tmp_path, "class Worker:\n    def open(self, **_):\n        import no_such_engine\n")


def test_a_peer_that_does_not_reply_times_out(tmp_path: Path) -> None:
    child = pretend_peer.opened(tmp_path, pretend_peer.COUNTS)
    with pytest.raises(PeerFailedError, match="did not reply within 0 seconds"):
        child.ask("complete", timeout=0.05, prompts=[[1]], tokens=10**6, width=None)
    child.process.send_signal(signal.SIGSTOP)
    child.close()  # does not wait for the reply
    assert gone(child.process.pid)


def test_a_text_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    child = pretend_peer.opened(tmp_path, pretend_peer.SHORT)
    with pytest.raises(PeerFailedError, match=r"it generated \[1, 1\] tokens instead of 4 for each of 2 prompts"):
        child.complete([[1], [2]], 4, None)
    child.close()


def test_a_reply_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    noisy = Child([sys.executable, "-c", "input(); print('hello')"], os.environ, tmp_path / "noise.log")
    with pytest.raises(PeerFailedError, match="it replied `hello`, which is not JSON"):
        noisy.ask("open")
    noisy.close()


def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path) -> None:
    """The stopped process of a killed parent would stay for ever."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import pretend_peer\n"
        "child = pretend_peer.opened(Path(sys.argv[1]), pretend_peer.COUNTS)\n"
        "child.pause(); print(child.process.pid, flush=True); input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None and parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: state(pid) == "T")
    parent.kill()
    parent.communicate()
    wait_until(lambda: gone(pid))
