#!/usr/bin/env bash
# Writes stubs, .pyi and Envoy's descriptor set from the definitions here.
# Usage: headrace_protos/generate.sh [FOLDER]   FOLDER: the root to write under, default the repository
set -euo pipefail
cd "$(dirname "$0")/.."
root=${1:-.}
python=${PYTHON:-.venv/bin/python}
googleapis=$("$python" -c 'import os, google.api.annotations_pb2 as a; print(os.path.abspath(os.path.join(os.path.dirname(a.__file__), "../..")))')

mkdir -p "$root/headrace_protos" "$root/envoy"
# The generator plugins of mypy-protobuf are beside the interpreter.
PATH="$(dirname "$(realpath -s "$python")"):$PATH" "$python" -m grpc_tools.protoc \
  -I. -I"$googleapis" \
  --python_out="$root" --grpc_python_out="$root" --mypy_out=quiet:"$root" --mypy_grpc_out=quiet:"$root" \
  headrace_protos/*.proto
# The descriptor set for the gateway's transcoder, with imports.
"$python" -m grpc_tools.protoc -I. -I"$googleapis" \
  --include_imports --descriptor_set_out="$root/envoy/descriptors.pb" headrace_protos/rest.proto headrace_protos/headrace.proto
