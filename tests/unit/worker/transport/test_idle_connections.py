"""What a client prints to standard error when its server closes the idle connection."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CALL_AND_WAIT = """
import os
import threading
from dlion_api.protocol import port_limits
port_limits.prepare_process()
import grpc
from concurrent.futures import ThreadPoolExecutor
port_limits.IDLE_WITHIN_S = 1
options = port_limits.connection_options(8, max_calls_per_connection=8)
server = grpc.server(ThreadPoolExecutor(1), options=options)
handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
idle = threading.Event()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
assert channel.unary_unary("/s/m")(b"x", timeout=60, wait_for_ready=True) == b"x"
channel.subscribe(lambda state: state is grpc.ChannelConnectivity.IDLE and idle.set())
assert idle.wait(60)
os._exit(0)  # the thread that watches the state may print an exception when the channel closes
"""


def _printed(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _CALL_AND_WAIT],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_idle_connection_that_ends_prints_nothing() -> None:
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    assert _printed(unset) == ""
    assert "connection idle" in _printed({**unset, "GRPC_VERBOSITY": "INFO"})


@pytest.mark.parametrize(
    "command",
    [
        ["dlion_operator", "--help"],
        ["dlion_worker.pod", "--help"],
    ],
    ids=lambda command: command[0],
)
def test_a_process_may_use_as_many_descriptors_as_the_system_allows(command: list[str]) -> None:
    script = "import resource, runpy, sys; sys.argv = sys.argv[1:]; hard = resource.getrlimit(7)[1]"
    script += "\nresource.setrlimit(7, (256, hard))"
    script += "\ntry: runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    script += "\nexcept SystemExit: print('soft', resource.getrlimit(7)[0] == hard)"
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.endswith("soft True\n"), done.stdout
