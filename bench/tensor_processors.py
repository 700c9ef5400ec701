"""Processors that pass everything on, for measuring the full path through the transformer."""

from headrace.processor import Processor


class Echo(Processor):
    model = "echo"


class Stream(Processor):
    model = "stream"
