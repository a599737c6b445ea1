from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longnet.attention.pattern import DilationPattern
from longnet.config import ConfigError, JobError
from longnet.config.cli import is_user_error, reports_user_errors

ROOT = Path(__file__).parents[2]


def raised_by(action: Callable[[], object]) -> ValueError:
    with pytest.raises(ValueError) as caught:
        action()
    return caught.value


def raise_job_error() -> None:
    raise JobError("the disk is full")


def test_our_own_errors_are_for_the_user_and_those_of_libraries_are_bugs() -> None:
    assert is_user_error(raised_by(raise_job_error))
    assert is_user_error(raised_by(lambda: DilationPattern((), ())))
    assert not is_user_error(raised_by(lambda: int("x")))
    assert not is_user_error(raised_by(lambda: b"\xff".decode()))


@pytest.mark.parametrize(("error", "code"), [(ConfigError(["seed=-1: expected at least 0"]), 2), (JobError("full"), 1)])
def test_a_user_error_ends_the_process_with_its_message(
    error: ValueError, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    @reports_user_errors
    def task() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        task()
    assert caught.value.code == code
    assert capsys.readouterr().err.startswith(str(error))


def test_a_bug_goes_through() -> None:
    @reports_user_errors
    def task() -> None:
        int("x")

    with pytest.raises(ValueError, match="invalid literal"):
        task()


def test_a_config_error_travels_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert error.problems == ["a", "b"]
    assert str(error) == "2 problems in the configuration:\n  a\n  b"


def test_a_reader_that_has_read_enough_ends_a_script():
    code = "from longnet.config.arguments import script\nscript(lambda words: print('word ' * 999_999))()"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.stdout.read(4) == b"word"
    done.stdout.close()
    assert done.stderr.read() == b""
    assert done.wait(60) == 141
