"""The containers of deploy/kserve as processes: with their commands, their environment, and the arguments of KServe.

KServe's controller puts the InferenceService's name for {{.Name}}, adds arguments, and mounts the model. Ports, and the
names of the cluster's DNS, are replaced by free ports of loopback.
"""

import asyncio
import os
import sys
import urllib.request
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.endpoints import steps_port
from headrace_protos import inference_pb2_grpc
from headrace_runner.services import predictor_tuning
from tests.support.forkserver import spawn
from tests.support.free_ports import free_predictor_port, free_settings
from tests.support.logger_process import free_port
from tests.system.calls import text_request
from tests.waiting import until

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kserve"
NAME, NAMESPACE = "chat", "models"
# Of the transformer: to see without long waits what happens while there is no predictor.
HASTE = {"TRANSFORMER_PREDICTOR_START_WAIT": "1"}


def documents(file):
    return {each["kind"]: each for each in yaml.safe_load_all((MANIFESTS / file).read_text())}


def mounted(container, folder, ports):
    """A container's variables as the cluster has them, with free ports."""
    found = {}
    for each in container["env"]:
        value = (
            each.get("value", "1").replace("{{.Name}}", NAME).replace("/mnt/models", str(ROOT / "models/storyteller"))
        )
        value = value.replace("/tmp/spool", str(folder)).replace(f"{NAME}-predictors:9000", f"127.0.0.1:{ports[9000]}")
        found[each["name"]] = str(ports.get(int(value), value)) if value.isdecimal() else value
    return found


async def is_ok(container, probe, ports):
    """Whether the kubelet's probe passes."""
    if "grpc" in container[probe]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[container[probe]['grpc']['port']]}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=container[probe]["grpc"].get("service", ""))
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    request, timeout=container[probe]["timeoutSeconds"]
                )
            except grpc.aio.AioRpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    get = container[probe]["httpGet"]
    address = f"http://127.0.0.1:{ports[get['port']]}{get['path']}"
    try:
        with await asyncio.to_thread(
            urllib.request.urlopen, address, timeout=container[probe]["timeoutSeconds"]
        ) as page:
            return page.status == 200
    except OSError:
        return False


@asynccontextmanager
async def predictor(container, folder, ports):
    with (folder / "predictor.log").open("wb") as log:
        # With the tuning of a stack's predictors it is a fork of the same process.
        tuning = predictor_tuning(free_settings(folder))
        variables = tuning | os.environ | mounted(container, folder / "predictor-spool", ports)
        running = await spawn((sys.executable, "-m", "headrace_predictor"), variables, ROOT, log)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.send_signal(9)
        await running.wait()


@asynccontextmanager
async def deployed_transformer(container, folder, ports):
    # What its controller adds to a container's own arguments.
    arguments = ("--model_name", NAME, "--predictor_host", f"{NAME}-predictor.{NAMESPACE}", "--http_port", "8080")
    variables = os.environ | mounted(container, folder / "transformer-spool", ports) | HASTE
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "transformer.log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(
            *container["command"],
            *container.get("args", ()),
            *arguments,
            env=variables,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def test_the_deployment_answers_and_the_probes_say_what_is_there(tmp_path):
    (predicting,) = documents("serving-runtime.yaml")["ServingRuntime"]["spec"]["containers"]
    (transforming,) = documents("inference-service.yaml")["InferenceService"]["spec"]["transformer"]["containers"]
    ports = {port: free_port() for port in (9100, 9001, 9003, 9101)}
    ports[9000] = free_predictor_port()
    ports[9004] = steps_port(ports[9000])
    transforming["env"].append({"name": "TRANSFORMER_HTTP_PORT", "value": "9003"})  # Its default.
    async with deployed_transformer(transforming, tmp_path, ports) as transformer:

        async def passes(container, *probes):
            assert transformer.returncode is None, (tmp_path / "transformer.log").read_text()
            return all([await is_ok(container, probe, ports) for probe in probes])

        every = ("startupProbe", "livenessProbe", "readinessProbe")
        # Without a predictor it is ready for calls, and refuses them in time.
        await until(lambda: passes(transforming, *every))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[9001]}") as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)

            async def code():
                try:
                    await stub.ModelInfer(text_request(NAME, "Once", max_tokens=2))
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            assert await code() is grpc.StatusCode.UNAVAILABLE
            async with predictor(predicting, tmp_path, ports) as running:
                await until(lambda: passes(predicting, *every))
                await until(code, holds=lambda status: status is grpc.StatusCode.OK)
                running.send_signal(15)
                assert await running.wait() == 0
            assert await code() is grpc.StatusCode.UNAVAILABLE
        assert await passes(transforming, *every)
        transformer.terminate()
        assert await transformer.wait() == 0
