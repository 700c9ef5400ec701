"""Settings: unknown and malformed ones are refused in one line that names them."""

import json
import re
import sys

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from headrace.errors import StartupError
from headrace.models.sources import ModelSource, is_name, parse_models
from headrace.payload.rules import Digest, Mode
from headrace.settings import Models, ServiceSettings, load, models_field
from headrace.validation import first_fault
from headrace_logger.settings import LoggerSettings
from headrace_predictor.settings import PredictorSettings
from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_runner.settings import StackSettings
from headrace_transformer.settings import TransformerSettings


class MillSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="MILL_", frozen=True, env_ignore_empty=True)

    models: Models = models_field()


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mill"])
    monkeypatch.delenv("MODELS", raising=False)


def load_with(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load(MillSettings, "mill")


def test_without_an_environment_the_defaults_apply(monkeypatch):
    settings = load_with(monkeypatch)
    assert (settings.host, settings.port, settings.log_level, settings.drain_s) == ("127.0.0.1", 0, "INFO", 5.0)
    assert [source.name for source in settings.models] == ["storyteller", "normalizer"]


def test_the_environment_is_read(monkeypatch):
    settings = load_with(monkeypatch, MILL_PORT="9000", MILL_LOG_LEVEL="DEBUG", MODELS="a=org/a@main")
    assert (settings.port, settings.log_level) == (9000, "DEBUG")
    assert settings.models == (ModelSource("a", "org/a", "main"),)


LINKS = {
    "MILL_SERVICE_HOST": "10.0.0.1",
    "MILL_SERVICE_PORT": "9000",
    "MILL_SERVICE_PORT_GRPC": "9000",
    "MILL_PORT": "tcp://10.0.0.1:9000",
    "MILL_PORT_9000_TCP": "tcp://10.0.0.1:9000",
    "MILL_PORT_9000_TCP_PROTO": "tcp",
    "MILL_PORT_9000_TCP_PORT": "9000",
    "MILL_PORT_9000_TCP_ADDR": "10.0.0.1",
    "MILL_METRICS_PORT": "tcp://[fd00::1]:9100",  # Of a service named mill-metrics.
    "MILL_METRICS_SERVICE_HOST": "fd00::1",
}


def test_service_links_of_kubernetes_are_no_settings(monkeypatch):
    settings = load_with(monkeypatch, **LINKS, MILL_LOG_LEVEL="DEBUG")
    assert (settings.port, settings.metrics_port, settings.log_level) == (0, 0, "DEBUG")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MILL_SERVICE_HOST", "example"),
        ("MILL_SERVICE_PORT", "tcp"),
        ("MILL_PORT", "tcp://10.0.0.1"),
        ("MILL_PORT_9000_TCP_ADDR", "here"),
        ("MILL_PORT_9000_ICMP", "tcp://10.0.0.1:9000"),
        ("MILL_PORTS", "tcp://10.0.0.1:9000"),
    ],
)
def test_a_variable_that_only_resembles_a_service_link_is_refused(monkeypatch, name, value):
    with pytest.raises(StartupError, match=f"^{name}"):
        load_with(monkeypatch, **{name: value})


def test_an_empty_value_counts_as_unset(monkeypatch):
    assert load_with(monkeypatch, MILL_PORT="").port == 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MILL_PROT", "1", "MILL_PROT: unknown setting; did you mean MILL_PORT?"),
        ("MILL_COLOUR", "red", "MILL_COLOUR: unknown setting; `python -m mill --help` lists the known ones"),
        ("MILL_PORT", "http", "MILL_PORT=http: must be an integer"),
        ("MILL_PORT", "65536", "MILL_PORT=65536: must be at most 65535"),
        ("MILL_PORT", "-1", "MILL_PORT=-1: must be at least 0"),
        ("MILL_LOG_LEVEL", "LOUD", "MILL_LOG_LEVEL=LOUD: must be DEBUG, "),
        ("MILL_DRAIN_S", "-1", "MILL_DRAIN_S=-1: must be at least 0"),
        ("MODELS", "storyteller", "MODELS=storyteller: 'storyteller' is not name=folder-or-hub-id"),
    ],
)
def test_an_unknown_or_malformed_setting_is_refused_in_one_line(monkeypatch, name, value, text):
    with pytest.raises(StartupError) as caught:
        load_with(monkeypatch, **{name: value})
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_help_lists_every_setting_with_its_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mill", "--help"])
    with pytest.raises(SystemExit, check=lambda error: error.code == 0):
        load_with(monkeypatch)
    shown = capsys.readouterr().out
    for line in ("MILL_PORT", "MILL_HOST", "MILL_DRAIN_S", "MODELS", "Default: 127.0.0.1"):
        assert line in shown


def test_models_are_folders_or_hub_ids_with_a_revision(tmp_path):
    assert parse_models(f" a={tmp_path} , b=org/name@v1.0,c=gpt2,") == (
        ModelSource("a", str(tmp_path)),
        ModelSource("b", "org/name", "v1.0"),
        ModelSource("c", "gpt2"),
    )
    folder, hub, _ = parse_models(f"a={tmp_path},b=org/name,c=gpt2")
    assert folder.is_local
    assert not hub.is_local


def test_a_name_may_have_slashes_and_a_hub_id_alone_is_a_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "local").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    named, at_engine, *of_hub = parse_models("a/b-c/d=org/local,a/e=http://h/v1,org/local,Qwen/Qwen3-0.6B@v1.0")
    assert (named, at_engine.name) == (ModelSource("a/b-c/d", "org/local"), "a/e")
    assert of_hub == [
        ModelSource("org/local", "org/local", from_hub=True),
        ModelSource("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "v1.0", from_hub=True),
    ]
    assert (named.is_local, of_hub[0].is_local) == (True, False)
    assert StackSettings(models="Qwen/Qwen3-0.6B@v1.0, a=b").first_model == "Qwen/Qwen3-0.6B"
    assert StackSettings(models=" a/b = c").first_model == "a/b"


@pytest.mark.parametrize(
    "name",
    [
        *["/", "a/", "/a", "a//b", "..", "a/..", "../a", "a/../b", "a/.", ".a", "a/.b", "-a", "a/-b", "a\\b"],
        *("", "a b", "a\n", "a/b\n", "a:b", "a@b", "a%2Fb", "é", "a/é", "\0", "a" * 256, "/".join("a" * 129)),
    ],
)
def test_other_names_are_refused(name):
    assert not is_name(name)
    with pytest.raises(ValueError, match=r"is not name=folder"):
        parse_models(f"{name}=org/name")
    with pytest.raises(ValueError, match=r"is not name=folder|is not a hub id|is not a revision|names no model"):
        parse_models(name + "//x")


def test_a_name_has_255_characters_at_most():
    assert is_name("/".join("a" * 128))


def test_a_folder_may_have_an_at_sign(tmp_path):
    folder = tmp_path / "model@home"
    folder.mkdir()
    assert parse_models(f"a={folder}") == (ModelSource("a", str(folder)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no model"),
        (" , ", "names no model"),
        ("a", "'a' is not name=folder-or-hub-id"),
        ("=x", "'=x' is not name="),
        ("a=", "'a=' is not name="),
        ("a/b=", "'a/b=' is not name="),
        ("a/b/c", "'a/b/c' is not a hub id"),
        ("a/b@", "'' is not a revision"),
        ("./a/b", "'./a/b' is not name="),
        ("http://h:1/v1", "'http://h:1/v1' is not name="),
        ("a/b,a/b=x", "names the model 'a/b' twice"),
        ("a=x,a=y", "names the model 'a' twice"),
        ("a=./missing", "'./missing' is not a folder"),
        ("a=/missing", "'/missing' is not a folder"),
        ("a=x/y/z", "'x/y/z' is not a folder"),
        ("a=sp ace", "'sp ace' is neither a folder nor a hub id"),
    ],
)
def test_malformed_models_are_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_models(text)


@pytest.mark.parametrize("cls", [TransformerSettings, PredictorSettings, LoggerSettings, StackSettings])
@pytest.mark.parametrize("value", ["?", "-7e99", " ", "x" * 200])
def test_no_refusal_is_in_the_words_of_a_library(cls, value):
    names = {field.validation_alias or name for name, field in cls.model_fields.items()}
    refusals = []
    for name in sorted(map(str, names)):
        try:
            cls.model_validate({name: value})
        except ValidationError as error:
            refusals.append(first_fault(error)[1])
    assert refusals
    for message in refusals:
        assert not re.search(
            r"[Ii]nput|[Vv]alue (should|is not)|String|[Uu]nable|pydantic|[Pp]attern '|Traceback", message
        )
        assert "\n" not in message


def of_service(monkeypatch, settings, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load(settings, settings.__module__.partition(".")[0])


def test_the_environment_sets_what_is_recorded(monkeypatch):
    read = of_service(
        monkeypatch,
        TransformerSettings,
        TRANSFORMER_PAYLOAD_LOG="all,storyteller=metadata,later=off",
        TRANSFORMER_PAYLOAD_SAMPLE="0.5",
        TRANSFORMER_PAYLOAD_REDACT=json.dumps([{"pattern": "secret"}]),
        TRANSFORMER_PAYLOAD_METADATA="X-User",
        TRANSFORMER_PAYLOAD_TENSOR_BYTES="4KiB",
        TRANSFORMER_PAYLOAD_TENSOR_DIGEST="blake2b",
    )
    rules = read.payload_rules
    assert (rules.models, rules.sample) == ({"storyteller": Mode.METADATA, "later": Mode.OFF}, 0.5)
    assert (rules.metadata, rules.tensor_bytes, rules.tensor_digest) == ({"x-user"}, 4096, Digest.BLAKE2B)
    record = PayloadRecord(prompt="a secret")
    rules.redact(record)
    assert record.prompt == "a [redacted]"
    # It may be loaded later, so the start goes on.
    assert read.unknown_logged_models == ["later"]


def test_a_service_may_be_among_the_replicas(monkeypatch):
    read = of_service(
        monkeypatch, TransformerSettings, TRANSFORMER_PREDICTOR_REPLICAS="_grpc._tcp.Predictor.example,a:1"
    )
    assert read.predictor_replicas == ("_grpc._tcp.predictor.example", "a:1")


@pytest.mark.parametrize(
    ("settings", "name", "value", "text"),
    [
        (TransformerSettings, "PAYLOAD_LOG", "some", "'some' is no mode; there are all, request,"),
        (TransformerSettings, "PAYLOAD_SAMPLE", "2", "must be at most 1"),
        (TransformerSettings, "PAYLOAD_REDACT", '[{"pattern": "("}]', "rule 1: '(' is no pattern of RE2: missing )"),
        (TransformerSettings, "PAYLOAD_REDACT", "nowhere.json", "neither a JSON list nor a file"),
        (TransformerSettings, "PAYLOAD_METADATA", "x-user,authorization", "authorization is a secret"),
        (TransformerSettings, "PAYLOAD_TENSOR_BYTES", "1TiB", "must be at most"),
        (TransformerSettings, "PAYLOAD_TENSOR_DIGEST", "md5", "must be off, blake2b or sha256"),
        (TransformerSettings, "PREDICTOR", "_grpc._tcp.predictor.example", "is not host:port"),
        *(
            (TransformerSettings, "PREDICTOR_REPLICAS", value, f"'{value}' is not host:port")
            for value in ("_grpc._udp.predictor", "_grpc._tcp", "_-._tcp.predictor", "predictor")
        ),
        (LoggerSettings, "SINKS", "ftp://127.0.0.1/", "must be a URL such as http://127.0.0.1:4318"),
        (LoggerSettings, "SINKS", "http://a/,here", "=here: must be a URL such as http://127.0.0.1:4318"),
        *((LoggerSettings, "GEN_AI_URL", url, f"={url}") for url in ("ftp://host", "grpc://", "host:4317")),
    ],
)
def test_a_wrong_setting_of_a_service_is_refused_in_one_line(monkeypatch, settings, name, value, text):
    name = settings.model_config["env_prefix"] + name
    with pytest.raises(StartupError) as caught:
        of_service(monkeypatch, settings, **{name: value})
    assert str(caught.value).startswith(name)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
