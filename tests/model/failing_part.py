"""A part of the check of GPUs that finds one figure and then crashes, hangs, or breaks a promise."""

import os
import sys
import time

from tests.gpu.report import Report, part_options

if __name__ == "__main__":
    options = part_options("fate")
    report = Report(options.report)
    report.figure("found", 7.0)
    if options.fate == "crash":
        os.abort()
    if options.fate == "hang":
        time.sleep(600)
    report.promise("what breaks", 1, 2)
    print("the last line", file=sys.stderr)
