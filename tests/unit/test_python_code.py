"""The declarations of a model.py: requests are checked against them, and an unusable file is refused by name."""

import threading

import numpy as np
import pytest

from headrace.errors import InvalidRequestError, NotReadyError, StartupError
from headrace.oip.model_description import config_of, metadata_of
from headrace.oip.tensors import Tensor, bytes_tensor
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.unit.python_models import infer, python_models, request


@pytest.fixture
def make(tmp_path):
    with python_models(tmp_path) as start:
        yield start


DECLARED = """
INPUTS = {"x": ("FP32", [-1, 3]), "name": ("BYTES", [1])}
OUTPUTS = {"y": ("INT64", [-1])}

async def execute(request):
    import numpy
    return {"y": numpy.array([request.inputs["x"].size])}
"""
X, NAME = Tensor("x", "FP32", np.zeros((2, 3), np.float32)), bytes_tensor("name", [b"n"])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([X], "input 'name' is missing"),
        ([X, NAME, bytes_tensor("z", [])], "unknown input 'z'; the model takes x, name"),
        ([Tensor("x", "FP64", np.zeros((2, 3))), NAME], "input 'x' must be FP32, not FP64"),
        ([Tensor("x", "FP32", np.zeros((3, 2), np.float32)), NAME], r"must have shape \[-1, 3\], not \[3, 2\]"),
        ([Tensor("x", "FP32", np.zeros(3, np.float32)), NAME], r"must have shape \[-1, 3\], not \[3\]"),
    ],
)
async def test_requests_are_checked_against_the_declaration(make, tensors, text):
    model = make(DECLARED)
    assert (await infer(model, request(X, NAME)))["y"].tolist() == [6]
    with pytest.raises(InvalidRequestError, match=text):
        await infer(model, request(*tensors))
    metadata = metadata_of(model.name, ["1"], model.description)
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("x", "FP32", [-1, 3]),
        ("name", "BYTES", [1]),
    ]
    assert metadata.outputs[0].name == config_of(model.name, model.description).output[0].name == "y"


async def test_damaged_tensors_are_refused_though_nothing_is_declared(make):
    model = make("async def execute(request): return request.raw")
    for datatype, raw in (("FP32", b"123"), ("BYTES", b"\x05\0\0\0abc"), ("BOOL", b"\x02"), ("FP33", b"")):
        message = ModelInferRequest(model_name="mine", raw_input_contents=[raw])
        message.inputs.add(name="x", datatype=datatype, shape=[1])
        with pytest.raises(InvalidRequestError):
            await model.infer(message)


async def test_only_the_requested_outputs_are_sent(make):
    model = make("""
        import numpy
        async def execute(request):
            return {"a": numpy.array([1]), "b": numpy.array([2])}
    """)
    assert list(await infer(model, request(outputs=["b"]))) == ["b"]
    with pytest.raises(InvalidRequestError, match="unknown output 'c'; the model gives a, b"):
        await infer(model, request(outputs=["c"]))


@pytest.mark.parametrize(("before", "after"), [("true", ""), ("__all__", "__all__"), ("logfire", "logfire")])
async def test_its_models_of_pydantic_may_have_plugins_unless_the_user_disabled_them(make, monkeypatch, before, after):
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", before)
    model = make("""
        import os, numpy
        DISABLED = os.environ.get("PYDANTIC_DISABLE_PLUGINS", "")
        async def execute(request):
            return {"disabled": numpy.array([DISABLED])}
    """)
    assert (await infer(model, request()))["disabled"].tolist() == [after.encode()]


async def test_load_and_unload_run_on_the_models_thread(make, tmp_path):
    code = """
        import threading, asyncio
        from pathlib import Path
        from . import beside
        async def load(folder):
            global where
            where = (folder / "said").read_text(), threading.current_thread().name
        async def unload():
            Path(__file__).with_name("gone").write_text(threading.current_thread().name)
        async def execute(request):
            import numpy
            return {"where": numpy.array([*where, beside.WORD])}
    """
    model = make(code, files={"said": "here", "beside.py": "WORD = 'neighbour'"})
    assert (await infer(model, request()))["where"].tolist() == [b"here", b"model-mine", b"neighbour"]
    model.close()
    assert (tmp_path / "model-0" / "gone").read_text() == "model-mine"
    with pytest.raises(NotReadyError):
        await infer(model, request())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nothing_like_it", "line 1 cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def execute(:", "cannot be imported: SyntaxError"),
        ("x = 1\nraise SystemExit(2)", "line 2 cannot be imported: SystemExit: 2"),
        ("x = 1", "has no `async def execute(request)`"),
        ("def execute(request): return {}", "has no `async def execute(request)`"),
        ("INPUTS = ['x']\nasync def execute(request): return {}", "INPUTS of"),
        ("INPUTS = {'x': ('FP33', [1])}\nasync def execute(request): return {}", "INPUTS of"),
        ("async def load(folder): raise OSError('no weights')\nasync def execute(request): return {}",
         "line 1 load() failed: OSError: no weights"),
    ],
)  # fmt: skip
async def test_a_file_that_cannot_be_served_is_named_in_one_line(make, code, text):
    threads = threading.active_count()
    with pytest.raises(StartupError) as raised:
        make(code)
    assert text in str(raised.value)
    assert "model mine: " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert threading.active_count() == threads
