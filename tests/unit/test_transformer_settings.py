"""The transformer's settings that depend on each other are refused together, in one line."""

import sys

import pytest

from headrace.errors import StartupError
from headrace.settings import load
from headrace_transformer.settings import TransformerSettings


def load_with(monkeypatch, **environment):
    monkeypatch.setattr(sys, "argv", ["transformer"])
    for name, value in environment.items():
        monkeypatch.setenv(f"TRANSFORMER_{name}", value)
    return load(TransformerSettings, "headrace_transformer")


def test_a_service_is_a_list_of_replicas_and_no_address_for_tensors(monkeypatch):
    service = "_grpc._tcp.Predictor.example"
    assert load_with(monkeypatch, PREDICTOR_REPLICAS=f"{service},a:1").predictor_replicas == (service.lower(), "a:1")
    for replicas in ("_grpc._udp.predictor", "_grpc._tcp", "_-._tcp.predictor", "predictor"):
        with pytest.raises(StartupError, match=rf"'{replicas}' is not host:port"):
            load_with(monkeypatch, PREDICTOR_REPLICAS=replicas)
    monkeypatch.delenv("TRANSFORMER_PREDICTOR_REPLICAS")
    with pytest.raises(StartupError, match=r"^TRANSFORMER_PREDICTOR=.*is not host:port"):
        load_with(monkeypatch, PREDICTOR=service)
