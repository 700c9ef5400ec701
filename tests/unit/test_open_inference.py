"""Settings return the values in force and refuse impossible ones."""

import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider

from headrace.errors import InvalidRequestError
from headrace.oip import settings_servicer as open_inference
from headrace.oip.settings_servicer import OpenInferenceBase
from headrace_protos import inference_pb2 as pb


class Servicer(OpenInferenceBase):
    def check_model(self, name):
        assert name == "known"


Servicer.__abstractmethods__ = frozenset()


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture(autouse=True)
def root():
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.INFO)
    yield logger
    logger.setLevel(before)


async def change_logs(servicer, **settings):
    request = pb.LogSettingsRequest()
    for name, value in settings.items():
        field = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(request.settings[name], field, value)
    response = await servicer.LogSettings(request, None)
    return {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in response.settings.items()}


async def change_traces(servicer, model="", **settings):
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    response = await servicer.TraceSetting(request, None)
    return {name: list(setting.value) for name, setting in response.settings.items()}


async def test_log_settings_are_the_levels_of_python(servicer, root):
    at_info = {"log_file": "", "log_error": True, "log_warning": True, "log_info": True, "log_verbose_level": 0}
    assert await change_logs(servicer) == at_info
    assert (await change_logs(servicer, log_verbose_level=2))["log_verbose_level"] == 1
    assert root.level == logging.DEBUG
    assert await change_logs(servicer, log_verbose_level=0) == at_info
    assert await change_logs(servicer, log_info=False) == {**at_info, "log_info": False}
    assert root.level == logging.WARNING
    assert await change_logs(servicer, log_warning=False) == {**at_info, "log_info": False, "log_warning": False}
    assert root.level == logging.ERROR
    assert await change_logs(servicer, **at_info) == at_info
    assert root.level == logging.INFO


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/x"}, "logs go to standard error"),
        ({"log_error": False}, "log_error cannot be off"),
        ({"log_warning": False}, "log_info cannot be on while log_warning is off"),
        ({"log_verbose_level": 1, "log_info": False}, "log_verbose_level cannot be on while log_info is off"),
        ({"log_colour": True}, "unknown log setting 'log_colour'"),
        ({"log_info": 1}, "'log_info' needs bool_param, not uint32_param"),
    ],
)
async def test_impossible_log_settings_are_refused_and_nothing_changes(servicer, root, settings, text):
    with pytest.raises(InvalidRequestError, match=text):
        await change_logs(servicer, **settings)
    assert root.level == logging.INFO


async def test_trace_settings_are_the_values_in_force(servicer, monkeypatch):
    monkeypatch.setattr(open_inference.trace, "get_tracer_provider", TracerProvider)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    off = await change_traces(servicer)
    assert (off["trace_mode"], off["trace_level"], off["trace_count"]) == (["opentelemetry"], ["OFF"], ["-1"])
    assert "AlwaysOn" in off["trace_sampler"][0]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    on = await change_traces(servicer, "known", trace_level=["TIMESTAMPS"], trace_count=[])
    assert on == {**off, "trace_level": ["TIMESTAMPS"]}


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("trace_level", ["TENSORS"], "cannot be changed while the server runs"),
        ("trace_mode", ["triton"], "trace_mode is opentelemetry"),
        ("trace_file", ["/tmp/x"], "unknown trace setting 'trace_file'"),
    ],
)
async def test_trace_settings_cannot_be_changed(servicer, name, values, text):
    with pytest.raises(InvalidRequestError, match=text):
        await change_traces(servicer, **{name: values})
