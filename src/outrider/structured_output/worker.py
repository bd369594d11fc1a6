"""The process that compiles grammars first: `python -m outrider.structured_output.worker`, started by `checker`.

It reads the vocabulary once. For every grammar it forks a child, which has limits of time, memory and stack, compiles
the grammar, follows it for some tokens and reports the memory that this took. A child that dies is an answer as well.
Frames on the standard input are a length (4 bytes) and a pickle; answers are lines of JSON. At the end of the input,
which comes when the parent process ends in any way, all children are killed.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import selectors
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .backend import Backend, BackendVocabulary

CPU_SECONDS = 2  # of a child; ordinary grammars take 0.01 s, and the largest useful ones 1 s
WALL_SECONDS = 20.0  # of a child: other processes may keep it from the CPU
MEMORY_BYTES = 2**27  # of a child, in addition to the worker's
STACK_BYTES = 2**21  # of a child. Threads of the parent have 8 MB, so what passes here does not overflow there
CHILDREN = 2  # at once, so that one slow grammar does not hold up the others
NICENESS = 10  # of a child, such that the engine's threads come first
STEPS = 24  # tokens for which a child follows a grammar
LENGTH = struct.Struct(">I")

TOO_LONG = f"it takes more than {CPU_SECONDS} s to compile"
TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MB to compile"
TOO_DEEP = "it is nested too deeply, or refers to itself in too long a chain"


@dataclass
class Child:
    number: int
    pid: int
    deadline: float
    answer: bytearray = field(default_factory=bytearray)


class Worker:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._children: dict[int, Child] = {}  # by the pipe of their answer

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(0.1 if self._children else None):
                    if key.fd:
                        self._read_answer(key.fd)
                    elif not self._read_command():
                        return
                self._kill([each for each in self._children.values() if time.monotonic() > each.deadline])
                while self._waiting and len(self._children) < CHILDREN:
                    self._start(*self._waiting.popleft())
        finally:
            self._kill(self._children.values())

    def _read_command(self) -> bool:
        """Take a grammar, or the number of one to give up; return False at the end of the input."""
        command = read_frame()
        if isinstance(command, int):
            self._waiting = deque(each for each in self._waiting if each[0] != command)
            self._kill([child for child in self._children.values() if child.number == command])
        elif command is not None:
            self._waiting.append(command)
        return command is not None

    @staticmethod
    def _kill(children: Any) -> None:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)

    def _start(self, number: int, kind: str, text: str) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                os.write(writing, json.dumps(examine(self._backend, kind, text)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        self._children[reading] = Child(number, pid, time.monotonic() + WALL_SECONDS)
        self._selector.register(reading, selectors.EVENT_READ)

    def _read_answer(self, pipe: int) -> None:
        child = self._children[pipe]
        data = os.read(pipe, 2**16)
        child.answer += data
        if data:
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        del self._children[pipe]
        _, status = os.waitpid(child.pid, 0)
        answer = json.loads(child.answer) if child.answer else {"refused": cause(status)}
        sys.stdout.write(json.dumps({"number": child.number, **answer}) + "\n")
        sys.stdout.flush()


def examine(backend: Backend, kind: str, text: str) -> dict[str, Any]:
    """Compile and follow a grammar under limits; return the bytes that it takes, or why it is refused."""
    limit()
    before = resident_bytes()
    try:
        native = backend.build(kind, text)
        backend.explore(native, STEPS)
        answer: dict[str, Any] = {"bytes": max(resident_bytes() - before, 0)}
        del native  # nested parts are freed by recursion, which may overflow the stack too
    except ValueError as error:
        return {"refused": str(error)[:2000]}
    except MemoryError:
        return {"refused": TOO_LARGE}
    return answer


def limit() -> None:
    """Bound the time, memory and stack of this process."""
    os.nice(NICENESS)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # the backend writes a message before it aborts
        os.dup2(null, standard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    statm = Path("/proc/self/statm")
    if statm.exists():  # macOS does not enforce a limit of the address space
        pages = int(statm.read_text().split()[0])
        size = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cause(status: int) -> str:
    """Return why a child died."""
    died_of = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if died_of in (signal.SIGSEGV, signal.SIGBUS):
        return TOO_DEEP
    return TOO_LONG if died_of in (signal.SIGXCPU, signal.SIGKILL) else TOO_LARGE


def read_frame() -> Any:
    """Read one object from the standard input; None at its end."""
    header = read_exactly(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    data = read_exactly(length)
    return pickle.loads(data) if len(data) == length else None


def read_exactly(length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            break
        data += part
    return bytes(data)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the input
    vocabulary = read_frame()
    if vocabulary is not None:
        Worker(Backend(BackendVocabulary(*vocabulary))).run()


if __name__ == "__main__":
    main()
