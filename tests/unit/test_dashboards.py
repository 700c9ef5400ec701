"""Grafana's dashboards are whole: it skips what it does not understand, without a message."""

import re

import pytest
import yaml

from tests.dashboards import DASHBOARDS, GRAFANA, panels

ROOT = GRAFANA.parents[2]
BUILT_IN = {"__rate_interval", "__range"}


def test_grafana_is_provisioned_with_both_dashboards_and_its_home_is_one_of_them():
    assert {dashboard["title"] for dashboard in DASHBOARDS.values()} == {"The stream", "The machine room"}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "headrace.yaml").read_text())["providers"]
    grafana = yaml.safe_load((ROOT / "deploy/compose/observability.yaml").read_text())["services"]["grafana"]
    folder = provider["options"]["path"]
    assert f"./deploy/observability/grafana/dashboards:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {f"{folder}/{name}.json" for name in DASHBOARDS}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_defined_and_used(name):
    dashboard = DASHBOARDS[name]
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {
        variable
        for panel in panels(dashboard)
        for target in panel["targets"]
        for variable in re.findall(r"\$(\w+)", target["expr"])
    }
    assert used - BUILT_IN == defined
