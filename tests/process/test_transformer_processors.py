"""A user's processor runs before and after the model, off the event loop, and its failures fail only their request."""

import asyncio
import textwrap
import threading

import grpc
import numpy as np
import pytest

from headrace.errors import OverloadedError, StartupError
from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace.threads import FairThreads
from headrace_protos import inference_pb2 as pb
from headrace_transformer.models.processors import ProcessorSource, RunningProcessor, parse_processors
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.status import code_of, refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each
from tests.waiting import until

CODE = """
    import numpy as np
    from headrace.errors import InvalidRequestError
    from headrace.processor import Processor

    class Doubled(Processor):
        inputs = {"word": ("BYTES", [1])}
        outputs = {"word": ("BYTES", [1]), "length": ("INT64", [1])}
        model = "echo"

        def load(self):
            self.suffix = b"!"

        def preprocess(self, request):
            word = request.inputs["word"][0]
            if word == b"bad":
                raise InvalidRequestError("a bad word")
            if word == b"broken":
                raise RuntimeError("secret")
            if word == b"list":
                return [word]
            if word == b"exit":
                raise SystemExit(3)
            request.state["length"] = len(word)
            return {"x": np.array([word + word], dtype=object)}

        async def postprocess(self, request, outputs):
            word = outputs["x"][0] + self.suffix
            return {"word": np.array([word], dtype=object), "length": np.array([request.state["length"]])}
"""


LARGE = """
    import numpy as np
    from headrace.processor import Processor

    class Halves(Processor):
        model = "echo"

        def preprocess(self, request):
            raw, typed = request.inputs["raw"], request.inputs["typed"]
            writeable = np.array([raw.flags.writeable, typed.flags.writeable])
            return {"x": raw[:, ::2], "y": typed + 1, "writeable": writeable}
"""


@pytest.fixture
def processor(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(CODE))
    return f"doubled={path}:Doubled"


def word_request(word, *outputs, **fields):
    request = pb.ModelInferRequest(**{"model_name": "doubled", "id": "r", **fields})
    add_input(request, bytes_tensor("word", [word]))
    for name in outputs:
        request.outputs.add(name=name)
    return request


async def test_large_tensors_pass_without_a_copy_that_a_processor_could_write(tmp_path):
    (tmp_path / "large.py").write_text(textwrap.dedent(LARGE))
    array = np.arange(90_000, dtype=np.float32).reshape(300, 300)
    request = pb.ModelInferRequest(model_name="halves")
    add_input(request, Tensor("raw", "FP32", array))
    mixed = pb.ModelInferRequest(model_name="halves")
    mixed.inputs.add(name="raw", datatype="FP32", shape=array.shape).contents.fp32_contents.extend(array.ravel())
    mixed.inputs.add(name="typed", datatype="INT64", shape=[2]).contents.int64_contents.extend([1, 2])
    add_input(request, Tensor("typed", "INT64", np.array([1, 2])))
    processor = f"halves={tmp_path / 'large.py'}:Halves"
    async with foreign_server(ForeignServer()) as address, transformer(address, processors=processor) as (stub, _):
        for each_request in (request, mixed):
            outputs = decode_outputs(await stub.ModelInfer(each_request))
            assert np.array_equal(outputs["x"].array, array[:, ::2])
            assert outputs["y"].array.tolist() == [2, 3]
            assert outputs["writeable"].array.tolist() == [False, False]
            (streamed,) = [response async for response in stub.ModelStreamInfer(each(each_request))]
            assert np.array_equal(decode_outputs(streamed.infer_response)["x"].array, array[:, ::2])


async def test_a_request_runs_through_both_and_the_model(processor):
    async with foreign_server(ForeignServer()) as address, transformer(address, processors=processor) as (stub, _):
        answer = await stub.ModelInfer(word_request(b"ab"))
        assert (answer.model_name, answer.id) == ("doubled", "r")
        outputs = decode_outputs(answer)
        assert outputs["word"].array.tolist() == [b"abab!"]
        assert outputs["length"].array.tolist() == [2]
        assert decode_outputs(await stub.ModelInfer(word_request(b"ab", "length"))).keys() == {"length"}

        (streamed,) = [response async for response in stub.ModelStreamInfer(each(word_request(b"c")))]
        assert decode_outputs(streamed.infer_response)["word"].array.tolist() == [b"cc!"]
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="doubled"))).ready
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="doubled"))
        assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs] == [
            ("word", "BYTES", [1])
        ]
        assert [tensor.name for tensor in metadata.outputs] == ["word", "length"]


@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        (b"bad", grpc.StatusCode.INVALID_ARGUMENT, "a bad word"),
        (b"broken", grpc.StatusCode.INTERNAL, "the processor failed on this request"),
        (b"exit", grpc.StatusCode.INTERNAL, "the processor failed on this request"),
        (b"list", grpc.StatusCode.INTERNAL, "the processor answered with list, not with a dict"),
    ],
)
async def test_an_error_of_the_processor_fails_only_its_request(processor, word, status, text, caplog):
    async with foreign_server(ForeignServer()) as address, transformer(address, processors=processor) as (stub, _):
        good = asyncio.gather(*(stub.ModelInfer(word_request(b"ok")) for _ in range(2)))
        raised = await refusal(stub.ModelInfer(word_request(word)))
        assert raised.code() is status
        assert text in raised.details()
        assert "secret" not in raised.details()
        assert dict(raised.trailing_metadata())["x-failed-hop"] == "transformer"
        assert len(await good) == 2


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (Tensor("word", "INT64", np.arange(1)), "input 'word' must be BYTES"),
        (bytes_tensor("word", [b"a", b"b"]), r"must have shape \[1\]"),
        (bytes_tensor("other", [b"a"]), "unknown input 'other'"),
    ],
)
async def test_inputs_that_are_not_declared_are_refused_before_its_code_runs(processor, tensor, text):
    server = ForeignServer()
    async with foreign_server(server) as address, transformer(address, processors=processor) as (stub, _):
        request = pb.ModelInferRequest(model_name="doubled")
        add_input(request, tensor)
        raised = await refusal(stub.ModelInfer(request), text)
        assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server.requests == []


async def test_a_processor_is_ready_while_its_model_is(processor):
    server = ForeignServer(ready=("ids",))
    async with foreign_server(server) as address, transformer(address, processors=processor) as (stub, _):
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="doubled"))).ready
        assert await code_of(stub.ModelInfer(word_request(b"a"))) is grpc.StatusCode.NOT_FOUND
        # A server without an index is asked again and again.
        server.ready.add("echo")
        await until(lambda: stub.router.is_ready("doubled"))
        assert await stub.ModelInfer(word_request(b"a"))
        server.ready.clear()
        await until(lambda: not stub.router.is_ready("doubled"))


async def test_a_caller_that_leaves_keeps_its_thread_taken_until_the_code_ends():
    pool, release = FairThreads(1, 1, "test"), threading.Event()
    left = asyncio.create_task(pool.run("", release.wait, 30))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    with pytest.raises(OverloadedError, match="at most 1 may"):
        await pool.run("", int)
    release.set()
    pool.close()


async def test_a_deadline_ends_a_request_whose_code_still_runs(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        textwrap.dedent("""
        import threading
        from headrace.processor import Processor

        class Slow(Processor):
            model = "echo"
            def preprocess(self, request):
                threading.Event().wait(3)
                return {}
        """)
    )
    async with (
        foreign_server(ForeignServer()) as address,
        transformer(address, processors=f"s={path}:Slow") as (stub, _),
    ):
        assert (
            await code_of(stub.ModelInfer(pb.ModelInferRequest(model_name="s"), metadata=(("x-timeout-ms", "50"),)))
            is grpc.StatusCode.DEADLINE_EXCEEDED
        )


def test_the_setting_names_modules_and_files():
    assert parse_processors("a/c=package.module:Class, b=some/where.py:Other") == (
        ProcessorSource("a/c", "package.module", "Class"),
        ProcessorSource("b", "some/where.py", "Other"),
    )
    for text in ("a", "a=b", "a=:C", "=m:C", "a=m:C,a=m:D", "../a=m:C", "a//b=m:C"):
        with pytest.raises(ValueError, match=r"is not name=|twice"):
            parse_processors(text)


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        ("class C: pass", "C", "C is not a subclass of headrace.processor.Processor"),
        (
            "from headrace.processor import Processor\nclass C(Processor):\n    inputs = {'x': 3}",
            "C",
            "inputs must look",
        ),
        (
            "from headrace.processor import Processor\nclass C(Processor):\n def load(self): raise OSError('no file')",
            "C",
            r"processor it: load\(\) failed: OSError: no file",
        ),
    ],
)
async def test_an_unusable_processor_is_refused_at_the_start_in_one_line(tmp_path, code, name, text):
    (tmp_path / "it.py").write_text(code)
    with pytest.raises(StartupError, match=text) as raised:
        await RunningProcessor(ProcessorSource("it", str(tmp_path / "it.py"), name), FairThreads(1, 2, "test")).load()
    assert "\n" not in str(raised.value)
