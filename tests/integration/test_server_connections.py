"""More connections than files may be open: the server refuses them one by one and goes on."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx

from outrider.server.timeouts import RESERVED_FILES
from waiting import TIMEOUT, wait_until

FILES = RESERVED_FILES + 40  # that may be open in the server


def test_connections_beyond_the_limit_of_files_get_503(model) -> None:
    command = [sys.executable, "-m", "outrider", "serve", str(model), "--port", "0", "--backend", "cpu"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))  # noqa: E731
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    lines: list[str] = []
    try:
        assert server.stderr is not None
        while "serving" not in (line := server.stderr.readline()):
            lines.append(line)
            assert line, lines
        port = int(line.rpartition(":")[2])
        with ExitStack() as stack:
            address = ("127.0.0.1", port)
            idle = [stack.enter_context(socket.create_connection(address, timeout=TIMEOUT)) for _ in range(FILES)]
            answers = [line.recv(4096) for line in idle[-8:]]
            assert all(answer.startswith(b"HTTP/1.1 503 ") and b"connections are open" in answer for answer in answers)
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT).status_code == 503
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT).status_code == 200)
        server.terminate()
        rest = server.stderr.read()
        assert server.wait(TIMEOUT) == 0 and "accept" not in rest and "Traceback" not in rest
    finally:
        server.kill()
        server.communicate()
