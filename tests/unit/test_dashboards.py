"""Grafana's dashboards are whole: it skips what it does not understand, without a message."""

import re
from itertools import combinations

import pytest
import yaml

from tests.dashboards import DASHBOARDS, GRAFANA, panels

ROOT = GRAFANA.parents[2]
UNITS = {"s", "short", "percentunit", "bytes", "reqps", "ops"}
BUILT_IN = {"__rate_interval", "__range"}


def provisioned_source() -> dict[str, str]:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    return source


def test_grafana_is_provisioned_with_both_dashboards_and_its_home_is_one_of_them():
    assert {dashboard["title"] for dashboard in DASHBOARDS.values()} == {"The stream", "The machine room"}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "headrace.yaml").read_text())["providers"]
    grafana = yaml.safe_load((ROOT / "deploy/compose/observability.yaml").read_text())["services"]["grafana"]
    folder = provider["options"]["path"]
    assert f"./deploy/observability/grafana/dashboards:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {f"{folder}/{name}.json" for name in DASHBOARDS}


def test_grafana_refreshes_as_often_as_prometheus_scrapes():
    scrapes = yaml.safe_load((ROOT / "deploy/observability/prometheus.yaml").read_text())["global"]["scrape_interval"]
    assert provisioned_source()["jsonData"]["timeInterval"] == scrapes
    assert all(dashboard["refresh"] == scrapes for dashboard in DASHBOARDS.values())


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_a_description_and_a_unit(name):
    for panel in panels(DASHBOARDS[name]):
        assert panel["title"]
        assert panel["description"].endswith(".")
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix: ")
        assert panel["type"] in {"timeseries", "stat", "heatmap"}
        # Names of several lines of one panel differ.
        assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_ids_are_unique_and_every_query_uses_the_provisioned_source(name):
    dashboard, source = DASHBOARDS[name], provisioned_source()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in panels(dashboard)}) == len(panels(dashboard))
    for asks in (*panels(dashboard), *dashboard["templating"]["list"]):
        assert asks["datasource"] == {"type": source["type"], "uid": source["uid"]}
    for panel in panels(dashboard):
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_neither_overlap_nor_stick_out(name):
    places = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


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


def test_dashboards_link_to_each_other():
    uids = {dashboard["uid"] for dashboard in DASHBOARDS.values()}
    assert len(uids) == len(DASHBOARDS)
    for dashboard in DASHBOARDS.values():
        assert {link["url"].removeprefix("/d/") for link in dashboard["links"]} == uids - {dashboard["uid"]}
