"""The thread pool under ThreadSanitizer, by itself: jobs from many threads, failures, sleeps, restarts, forks."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"
OPTIONS = "halt_on_error=1:die_after_fork=0:exitcode=66"
RACE = 66


def compile_driver(pool: Path, program: Path) -> Path:
    command = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{SOURCES}"]
    subprocess.run([*command, str(HERE / "pool_driver.cpp"), str(pool), "-o", str(program)], check=True)
    return program


def drive(program: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    command, environment = [str(program), str(rounds)], {**os.environ, "TSAN_OPTIONS": OPTIONS}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "unexpected memory mapping" in done.stderr:  # the sanitizer is older than the kernel's way to scatter addresses
        fixed = ["setarch", platform.machine(), "-R", *command]
        done = subprocess.run(fixed, capture_output=True, text=True, env=environment)
    return done


@pytest.mark.timeout(3600)
def test_the_pool_has_no_race(tmp_path: Path) -> None:
    done = drive(compile_driver(SOURCES / "threads.cpp", tmp_path / "pool"), 5000 if LONG else 100)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr[-4000:]


def test_a_race_is_seen(tmp_path: Path) -> None:
    """Without the order that the end of a part makes, what the part wrote may not be there yet."""
    ordered = "pending_.fetch_sub(1, std::memory_order_release)"
    source = (SOURCES / "threads.cpp").read_text()
    assert ordered in source
    (tmp_path / "threads.cpp").write_text(source.replace(ordered, ordered.replace("release", "relaxed")))
    done = drive(compile_driver(tmp_path / "threads.cpp", tmp_path / "pool"), 100)
    assert done.returncode == RACE and "data race" in done.stderr
