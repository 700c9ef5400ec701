"""Docker Compose accepts the second gateway of envoy/README.md, and it differs from the first where it must."""

import json
import re
import shutil
import subprocess

from tests.containers.stack import ROOT


def test_the_second_gateway_of_the_readme_works(engine, tmp_path):
    (tmp_path / "services").mkdir()
    for file in ("compose.yaml", "services/images.yaml"):
        shutil.copy(ROOT / file, tmp_path / file)
    (override,) = re.findall(
        r"```yaml\n(# compose\.override\.yaml.*?)```", (ROOT / "envoy/README.md").read_text(), re.S
    )
    (tmp_path / "compose.override.yaml").write_text(override)
    command = ("docker", "compose", "config", "--format", "json")
    output = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    first, second = (json.loads(output)["services"][name] for name in ("envoy", "envoy-2"))
    assert {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)} == {"ports", "networks"}
    assert [port["published"] for port in second["ports"]] == ["8088"]
    assert second["networks"].keys() == first["networks"].keys()
    assert second["networks"]["models"]["aliases"] == ["envoy"]
