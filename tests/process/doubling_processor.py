"""A processor around `echo` that doubles its outputs."""

from headrace.processor import Processor


class Doubles(Processor):
    model = "echo"

    def preprocess(self, request):
        return request.inputs

    def postprocess(self, request, outputs):
        return {name: 2 * array for name, array in outputs.items()}
