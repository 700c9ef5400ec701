"""An engine process with vLLM: `python -m headrace_predictor.vllm_engine FD PARENT`.

FD is the engine's socket, PARENT the predictor's process id. The process ends with the predictor.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys

from headrace.frames import framed
from headrace_predictor.engine_process.host import die_with
from headrace_protos import engine_pb2


def main(connection: socket.socket, parent: int) -> None:
    die_with(parent)
    # It was inherited; a process that held it too would hide the end of this one.
    connection.set_inheritable(False)
    if importlib.util.find_spec("vllm") is None:
        error = f"{sys.executable} has no vLLM: install it there, or set PREDICTOR_VLLM_PYTHON"
        connection.sendall(framed(engine_pb2.EngineFrame(startup_error=error).SerializeToString()))
        sys.exit(os.EX_CONFIG)
    from headrace_predictor.engine_process import worker
    from headrace_predictor.vllm_engine.loading import load_vllm

    worker.run(connection, load_vllm)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
