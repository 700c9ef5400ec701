"""A model's name in a path may have slashes, as they are or as `%2F`: it reaches a service whole."""

import pytest

from tests.process.gateway_before_fakes import Gateway

V1 = ("/v1/models/", "/openai/v1/models/")


@pytest.mark.parametrize(
    "name", ["plain", "org/name", "org/team/name-1.5", "org/infer", "org/versions/1", "stats/stats"]
)
@pytest.mark.parametrize("is_encoded", [False, True])
async def test_a_name_reaches_its_service_whole(gateway: Gateway, name: str, is_encoded: bool) -> None:
    written = name.replace("/", "%2f") if is_encoded else name
    for head in V1:
        assert (await gateway.request("GET", head + written)).json == ["Model", name, ""]
    for action, method in (("load", "RepositoryLoad"), ("unload", "RepositoryUnload")):
        if name != "org/versions/1" or is_encoded:
            answer = await gateway.request("POST", f"/v2/repository/models/{written}/{action}", b"{}")
            assert answer.json == [method, name, ""]
    if "/" in name and not is_encoded and name.rpartition("/")[2] in ("infer", "1", "stats"):
        return  # Whoever calls such a model without an action writes `%2F`.
    for end, verb, method in (
        *(("", "GET", "ModelMetadata"), ("/ready", "GET", "ModelReady"), ("/config", "GET", "ModelConfig")),
        *(("/stats", "GET", "ModelStatistics"), ("/infer", "POST", "Infer"), ("/generate", "POST", "Generate")),
        ("/generate_stream", "POST", "GenerateStream"),
    ):
        body = b"{}" if verb == "POST" else b""
        assert (await gateway.request(verb, f"/v2/models/{written}{end}?a=b/c", body)).json == [method, name, ""]
        versioned = await gateway.request(verb, f"/v2/models/{written}/versions/3{end}/", body)
        assert versioned.json == [method, name, "3"]
    setting = f"/v2/models/{written}/trace/setting"
    assert (await gateway.request("GET", setting)).json == ["ReadTraceSetting", name, ""]
    assert (await gateway.request("POST", setting, b"{}")).json == ["WriteTraceSetting", name, ""]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v2/models/stats", ["ModelStatistics", "", ""]),
        ("/v2/models/org/infer/infer", ["Infer", "org/infer", ""]),
        ("/v2/models/org/versions/1/infer", ["Infer", "org", "1"]),
        ("/v2/models/org%2Fversions/versions/1/infer", ["Infer", "org/versions", "1"]),
        ("/v2/models//org///name//infer/", ["Infer", "org/name", ""]),
        # What could be a path stays a name, which no model has.
        ("/v2/models/org%2F..%2Fname/infer", ["Infer", "org/../name", ""]),
        ("/v2/models/%2Fetc%2Fpasswd/infer", ["Infer", "/etc/passwd", ""]),
        ("/v2/models/org/name%2F/infer", ["Infer", "org/name/", ""]),
        ("/v2/models/org%252Fname/infer", ["Infer", "org%2Fname", ""]),
        ("/v2/models/org%5C..%5Cname/infer", ["Infer", "org\\..\\name", ""]),
        ("/v2/models/" + "a/" * 1000 + "b/infer", ["Infer", "a/" * 1000 + "b", ""]),
        ("/v2/repository/models/org/infer/load", ["RepositoryLoad", "org/infer", ""]),
        ("/v2/repository/models/org%2F..%2Fname/load", ["RepositoryLoad", "org/../name", ""]),
    ],
)
async def test_the_end_of_a_name_is_known(gateway: Gateway, path: str, expected: list[str]) -> None:
    verb = "GET" if expected[0] == "ModelStatistics" else "POST"
    assert (await gateway.request(verb, path, b"{}" if verb == "POST" else b"")).json == expected


@pytest.mark.parametrize("dots", ["..", "%2e%2e", ".%2E"])
async def test_dots_are_those_of_the_path(gateway: Gateway, dots: str) -> None:
    answer = await gateway.request("POST", f"/v2/models/org/{dots}/name/infer", b"{}")
    assert answer.json == ["Infer", "name", ""]
    for path in (f"/v2/models/{dots}/{dots}/etc/passwd", f"/v1/models/org/{dots}/{dots}/x", f"/v2/models/{dots}/infer"):
        answer = await gateway.request("GET", path)
        assert (answer.status, answer.headers["x-failed-hop"]) == (404, "gateway")


@pytest.mark.parametrize("path", ["/v2/models/org%00/infer", "/v1/models/org%2F%00"])
async def test_a_zero_byte_is_refused(gateway: Gateway, path: str) -> None:
    assert (await gateway.request("GET", path)).status == 400


@pytest.mark.parametrize("verb", ["DELETE", "POST"])
@pytest.mark.parametrize("name", ["plain", "org/name"])
async def test_other_methods_of_a_model_are_unknown(gateway: Gateway, verb: str, name: str) -> None:
    answer = await gateway.request(verb, f"/v1/models/{name}")
    assert (answer.status, answer.json["error"]["message"]) == (404, "unknown path or method")
