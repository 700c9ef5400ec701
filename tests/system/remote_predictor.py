"""The predictor with slow models (faulty_predictor.py) on a host of its own: in the network namespace NAMESPACE."""

import os

from headrace_predictor import __main__
from tests.support.network import enter_namespace

if __name__ == "__main__":
    enter_namespace(os.environ["NAMESPACE"])
    __main__.main(prepare="tests.system.faulty_predictor:prepare")
