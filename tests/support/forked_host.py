"""The host of engine processes as a fork of a predictor's zygote, see zygote.py.

Run there, it serves the control socket that is its standard input. With `install` a predictor's first host is a fork of
the predictor, which has imported the libraries of models and has no threads when it makes its `EngineHost`.
"""

import os
import socket

from headrace_predictor.engine_process import host
from headrace_predictor.engine_process.engine_host import EngineHost


def install() -> None:
    make = EngineHost.__init__

    def make_and_fork(self: EngineHost, prepare: str = "") -> None:
        make(self, prepare)
        self._control, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._control.close()
            host.main(theirs, parent)
        theirs.close()

    EngineHost.__init__ = make_and_fork


if __name__ == "__main__":
    host.main(socket.socket(fileno=0), os.getppid())
