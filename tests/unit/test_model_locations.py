"""A model is loaded from a configured source, the repository folder, or an allowed hub id or URL; from nowhere else."""

import pytest

from headrace.errors import ForbiddenError, InvalidRequestError, NotFoundError, StartupError
from headrace.models.sources import ModelSource
from headrace_predictor.repository.loading import ModelLocations
from headrace_predictor.settings import PredictorSettings


@pytest.fixture
def locations(tmp_path):
    inner = ("org/theirs", "org/.hidden", "mixed/inner", "a/b/c", ".hidden/x")
    for name in ("repository/mine", "configured", "secret", *(f"repository/{name}" for name in inner)):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "repository" / "mixed" / "config.json").touch()
    (tmp_path / "repository" / "org" / ".note").touch()
    return ModelLocations(
        PredictorSettings(
            MODELS=f"first={tmp_path / 'configured'}",
            model_repository=tmp_path / "repository",
            hub_allow="good/*, gpt2,models/*",
        )
    )


def test_names_are_looked_up_in_order(locations, tmp_path):
    assert locations.find("first") == ModelSource("first", str(tmp_path / "configured"))
    assert locations.find("mine") == ModelSource("mine", str(tmp_path / "repository" / "mine"))
    assert locations.find("gpt2").location == "gpt2"
    assert locations.find("good/model").location == "good/model"
    assert locations.find("chat", "good/model@v1.0") == ModelSource("chat", "good/model", "v1.0", from_hub=True)
    assert locations.names() == ["a/b", "mine", "mixed", "org/theirs"]


def test_a_folder_of_folders_alone_is_an_organisation(locations, tmp_path):
    assert locations.find("org/theirs") == ModelSource("org/theirs", str(tmp_path / "repository" / "org" / "theirs"))
    assert locations.find("a/b/c", "good/model") == ModelSource("a/b/c", "good/model", from_hub=True)
    for name in ("org", "a", "a/b/c", "good/a/b"):
        with pytest.raises((NotFoundError, InvalidRequestError)):
            locations.find(name)
    with pytest.raises(ForbiddenError, match="PREDICTOR_HUB_ALLOW"):  # A hub id, for the folder `mixed` is a model.
        locations.find("mixed/inner")


def test_a_hub_id_is_never_read_as_a_folder(locations):
    source = locations.find("models/storyteller")
    assert not source.is_local


@pytest.mark.parametrize("name", ["evil/model", "Good/model", "goodx/model"])
def test_hub_ids_that_are_not_allowed_are_forbidden(locations, name):
    with pytest.raises(ForbiddenError, match="PREDICTOR_HUB_ALLOW"):
        locations.find(name)
    with pytest.raises(ForbiddenError, match="PREDICTOR_HUB_ALLOW"):
        locations.find("chat", name)


@pytest.mark.parametrize("name", ["nobody", "secret", "configured", "a" * 255])
def test_other_names_are_not_found(locations, name):
    with pytest.raises(NotFoundError):
        locations.find(name)


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "good/..", "good/.", "..", ".hidden", "/etc", "mine/../../secret", "mine/"),
        *("good/a\n", "", " ", "good/a@", "good/a@../x", "\0", "a" * 256, "a" * 5000, "good\\..", "good/%2e%2e"),
    ],
)
def test_names_that_could_be_paths_are_refused(locations, name):
    with pytest.raises((InvalidRequestError, ForbiddenError, NotFoundError)):
        locations.find(name)
    with pytest.raises((InvalidRequestError, NotFoundError, ForbiddenError)):
        locations.find(name, "good/model")
    if name:
        with pytest.raises((InvalidRequestError, ForbiddenError)):
            locations.find("chat", name)


def test_a_name_with_a_configured_source_uses_no_other(locations, tmp_path):
    assert locations.find("first", str(tmp_path / "configured")).name == "first"
    with pytest.raises(InvalidRequestError, match="by another name"):
        locations.find("first", "good/model")


def test_without_settings_only_configured_models_can_be_loaded(tmp_path):
    locations = ModelLocations(PredictorSettings(MODELS=f"first={tmp_path}"))
    assert locations.find("first").name == "first"
    assert locations.names() == []
    with pytest.raises(NotFoundError):
        locations.find("mine")
    with pytest.raises(ForbiddenError):
        locations.find("good/model")


def test_malformed_patterns_are_refused(monkeypatch):
    from headrace.settings import load

    monkeypatch.setenv("PREDICTOR_HUB_ALLOW", "good/*,/etc/*")
    monkeypatch.setattr("sys.argv", ["predictor"])
    with pytest.raises(StartupError, match=r"PREDICTOR_HUB_ALLOW=.*: '/etc/\*' is not a pattern of hub ids"):
        load(PredictorSettings, "headrace_predictor")


@pytest.fixture
def urls(tmp_path):
    return ModelLocations(
        PredictorSettings(
            MODELS=f"first={tmp_path}",
            hub_allow="*/*,hf://org/*,s3://models/chat/*,oci://registry.example:5000/team/*,oci://*.corp/one,oci://one.tag/a*:v*,oci://one.digest/a@sha256:a*",
        )
    )


@pytest.mark.parametrize(
    ("source", "location", "revision"),
    [
        ("hf://org/name@v1", "org/name", "v1"),
        ("s3://models/chat/story/", "s3://models/chat/story", None),
        ("s3://models/chat/a/b.gguf", "s3://models/chat/a/b.gguf", None),
        ("oci://registry.example:5000/team/a/b:v1", "oci://registry.example:5000/team/a/b:v1", None),
        ("oci://one.tag/ab:v2", "oci://one.tag/ab:v2", None),
        *((f"oci://one.digest/a{tag}@sha256:{'a' * 64}",) * 2 + (None,) for tag in ("", ":v1")),
        (f"oci://eu.corp/one@sha256:{'a' * 64}", f"oci://eu.corp/one@sha256:{'a' * 64}", None),
    ],
)
def test_a_url_that_matches_a_pattern_is_loaded_by_another_name(urls, source, location, revision):
    found = urls.find("chat", source)
    assert (found.location, found.revision, found.is_local) == (location, revision, False)
    with pytest.raises((InvalidRequestError, NotFoundError)):
        urls.find(source)


@pytest.mark.parametrize(
    "source",
    [
        *("s3://models/other/story", "s3://models-2/chat/story", "s3://x/models/chat/y", "gs://models/chat/story"),
        *("oci://registry.example/team/a", "oci://evil.example/a.corp/one", "oci://eu.corp/two", "az://c/org/name"),
        *("oci://eu.corp/one/two", "s3://models/chat", "oci://one.tag/ab", "oci://one.tag/ab:w", "oci://one.tag/b:v1"),
        *(f"oci://one.tag/ab:v2@sha256:{'a' * 64}", f"oci://one.digest/a@sha256:{'b' * 64}", "oci://one.digest/a:v1"),
    ],
)
def test_no_wildcard_reaches_from_one_part_of_a_url_into_another(urls, source):
    with pytest.raises(ForbiddenError, match=f"^{source} may not be loaded; add it to PREDICTOR_HUB_ALLOW"):
        urls.find("chat", source)


@pytest.mark.parametrize(
    "source",
    [
        *("s3://models/chat/../secret", "s3://models/chat/..", "s3:///etc/passwd", "s3://", "s3://models/chat//x"),
        *("file:///etc/passwd", "http://models/chat", "S3://models/chat/x", "s3://models/chat/a\n", "hf://../x"),
        *("oci://registry.example:5000/team/../x", "oci://user@eu.corp/one", "oci://eu.corp/one@sha256:abc"),
        *("oci://eu.corp/one:", "s3://models/chat/a?versionId=1", "s3://models/chat/*", "hf:///etc/passwd"),
    ],
)
def test_malformed_urls_are_refused(urls, source):
    with pytest.raises(InvalidRequestError):
        urls.find("chat", source)
    with pytest.raises((InvalidRequestError, NotFoundError)):
        urls.find(source)
