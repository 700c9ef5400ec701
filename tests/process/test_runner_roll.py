"""`make roll` replaces each service once its successor serves, with the settings of the command, or leaves it alone.

The services are fakes; tests/slow/test_roll.py has real ones under load.
"""

from collections.abc import Iterator

import pytest

from tests.process.fake_runner import Runner, command, running
from tests.process.test_runner_stack import gone


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as environment:
        # A path of more characters than that of a socket may have.
        environment.setenv("TMPDIR", str(tmp_path_factory.mktemp("t" * 100)))
        with running(tmp_path_factory.mktemp("roll") / "run") as started:
            started.wait_ready()
            yield started


def test_settings_that_only_a_start_can_change_are_refused(runner: Runner) -> None:
    before = set(runner.services())
    fixed = {
        "PREDICTORS": "2",
        "LOGGER_PORT": "9",
        "GATEWAY_HOSTS": "*",
        "PREDICTOR_ENDPOINTS": "predictor.invalid:9000",
    }
    for setting, value in fixed.items():
        rolled = command(runner, "roll", **{setting: value})
        assert rolled.returncode == 1
        assert rolled.stderr.startswith(f"not rolled: {setting}={value}: cannot change while the stack runs")
    assert set(runner.services()) == before


def test_a_successor_that_does_not_start_changes_nothing(runner: Runner) -> None:
    before = set(runner.services())
    rolled = command(runner, "roll", PREDICTOR_LOG_LEVEL="LOUD")
    assert rolled.returncode == 1
    assert rolled.stderr == "not rolled: the new predictor-0 did not start: PREDICTOR: LOUD is no level\n"
    assert set(runner.services()) == before


def test_every_service_is_replaced_with_the_settings_of_the_command(runner: Runner) -> None:
    """This also holds after the refusals above."""
    before = runner.services()
    envoy = [process for process in before if "envoy" in process.name()]
    rolled = command(runner, "roll", LOGGER_LOG_LEVEL="DEBUG")
    assert (rolled.returncode, rolled.stdout) == (0, "every service has been replaced\n"), rolled.stderr
    assert len(envoy) == 1
    assert gone([process for process in before if process not in envoy])
    assert envoy[0].is_running()
    after = [process for process in runner.services() if process not in before]
    assert len(after) == 3
    assert all(process.environ()["LOGGER_LOG_LEVEL"] == "DEBUG" for process in after)
    assert not (runner.settings.run_folder / "roll.json").exists()
    # A service that ends later is restarted with them, and the next roll keeps them.
    assert command(runner, "roll").returncode == 0
    assert gone(after)
    last = [process for process in runner.services() if process not in envoy]
    assert len(last) == 3
    assert all(process.environ()["LOGGER_LOG_LEVEL"] == "DEBUG" for process in last)
