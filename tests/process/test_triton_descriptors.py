"""Our inference protocol is Triton's: the same messages, fields, numbers, enums and services.

Two stub sets of package `inference` cannot live in one process, so tritonclient's is read by
another process, whose interpreter has it: .venv-clients.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"

# Runs in either interpreter. File names and options differ, without an effect on messages.
DUMP = """
import importlib, json, sys

def messages(descriptors):
    for message in descriptors:
        yield message.full_name, {
            "oneofs": sorted(oneof.name for oneof in message.oneofs),
            "enums": [enum.full_name for enum in message.enum_types],
            "map_entry": message.GetOptions().map_entry,
            "fields": {
                field.name: {
                    "number": field.number,
                    "type": field.type,
                    "repeated": field.is_repeated if hasattr(field, "is_repeated") else field.label == 3,
                    "oneof": field.containing_oneof.name if field.containing_oneof else None,
                    "presence": field.has_presence,
                    "message": field.message_type.full_name if field.message_type else None,
                    "enum": field.enum_type.full_name if field.enum_type else None,
                }
                for field in message.fields
            },
        }
        yield from messages(message.nested_types)

def enums(file):
    def nested(message):
        yield from message.enum_types
        for inner in message.nested_types:
            yield from nested(inner)
    yield from file.enum_types_by_name.values()
    for message in file.message_types_by_name.values():
        yield from nested(message)

def dump(file):
    return {
        "package": file.package,
        "messages": dict(messages(file.message_types_by_name.values())),
        "enums": {enum.full_name: {value.name: value.number for value in enum.values} for enum in enums(file)},
        "services": {
            service.full_name: {
                method.name: [
                    method.input_type.full_name,
                    method.output_type.full_name,
                    method.client_streaming,
                    method.server_streaming,
                ]
                for method in service.methods
            }
            for service in file.services_by_name.values()
        },
    }

print(json.dumps([dump(importlib.import_module(name).DESCRIPTOR) for name in sys.argv[1:]]))
"""


def dumped(python, *modules):
    # Warnings of the other interpreter do not matter.
    command = [str(python), "-W", "ignore", "-c", DUMP, *modules]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def files():
    """(ours, Triton's) of the service file and of the model configuration's."""
    if not CLIENTS_PYTHON.exists():
        pytest.skip(".venv-clients with tritonclient is missing: `make test` makes it")
    ours = dumped(sys.executable, "headrace_protos.inference_pb2", "headrace_protos.model_config_pb2")
    tritons = dumped(CLIENTS_PYTHON, "tritonclient.grpc.service_pb2", "tritonclient.grpc.model_config_pb2")
    return list(zip(ours, tritons, strict=True))


@pytest.mark.parametrize("part", ["package", "messages", "enums", "services"])
def test_our_descriptors_equal_tritons(files, part):
    for ours, tritons in files:
        assert ours[part] == tritons[part]
    assert len(files[0][0]["messages"]) > 50
