"""Run in a fork of a predictor's zygote: the host of engine processes, whose control socket is the standard input."""

import os
import socket

from headrace_predictor.engine_process import host

if __name__ == "__main__":
    host.main(socket.socket(fileno=0), os.getppid())
