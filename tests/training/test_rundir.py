from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from longnet.checkpoint import Facts, Writer, path_of
from longnet.config.schema import JobConfig
from longnet.training.rundir import RunDirectory, config_hash


def directory(job) -> RunDirectory:
    return RunDirectory(job.run.root, job.run.name)


def started(job, steps_saved: bool = True) -> RunDirectory:
    run = directory(job)
    run.open(job, {"python": "3"})
    run.close()
    if steps_saved:
        save(run, 3)
    return run


def save(run: RunDirectory, step: int, loss: float | None = None) -> Path:
    path = path_of(run.checkpoints, step)
    Writer(path, {"global_step": step}, Facts(step, config_hash(JobConfig()), loss)).write()
    return path


def test_a_new_run_begins_at_step_0_and_leaves_nothing_before_it_opens(make_job):
    job = make_job()
    run = directory(job)
    run.check_writable()
    assert run.find_start(job) is None
    assert not os.path.exists(job.run.root)


def test_opening_writes_the_config_and_adds_a_session(make_job):
    job = make_job()
    started(job)
    run = started(job)
    assert yaml.safe_load(run.config.read_text()) == asdict(job)
    assert len(json.loads(run.environment.read_text())["sessions"]) == 2


def test_opening_removes_what_a_killed_save_left(make_job):
    run = started(make_job())
    for name in (".tmp-step-00000004-0", ".old-step-00000002-1"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "state.json").write_text("{}")
    started(make_job(), steps_saved=False)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000003"]


def test_auto_goes_on_from_the_last_checkpoint(make_job):
    run = started(make_job())
    assert directory(make_job()).find_start(make_job()) == run.last


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__max_steps": 99},
        {"trainer__log_every": 7, "callbacks__save_every": 9, "logger__tensorboard": True},
        {"data__num_workers": 2, "trainer__precision": "bf16", "attention__backend": "reference"},
        {"data__batch_size": 1, "trainer__accumulate": 2},
        {"data__batch_size": 1, "trainer__devices": 2, "strategy__name": "ddp"},
    ],
)
def test_auto_accepts_what_changes_only_how_the_run_is_run(make_job, changes):
    run = started(make_job())
    assert run.find_start(make_job(**changes)) == run.last


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"optim__lr": 1e-5}, "optim.lr: 0.003 there, 1e-05 here"),
        ({"model__hidden_size": 64}, "model.hidden_size: 32 there, 64 here"),
        ({"attention__dilated__base": 32}, "attention.dilated.base"),
        ({"data__context_length": 32}, "data.context_length"),
        ({"seed": 2}, "seed: 1337 there, 2 here"),
        ({"data__batch_size": 4}, "rows per step .*: 2 there, 4 here"),
    ],
)
def test_auto_refuses_another_config_and_says_where_it_differs(make_job, changes, listed):
    run = started(make_job())
    with pytest.raises(ValueError, match=listed) as caught:
        run.find_start(make_job(**changes))
    assert "run.name=default-2" in str(caught.value)


def test_all_differences_are_listed_at_once(make_job):
    run = started(make_job())
    with pytest.raises(ValueError, match=r"(?s)optim\.lr.*optim\.z_loss"):
        run.find_start(make_job(optim__lr=1.0, optim__z_loss=0.1))


def test_a_run_without_a_checkpoint_may_be_started_anew_with_another_config(make_job):
    run = started(make_job(), steps_saved=False)
    assert run.find_start(make_job(optim__lr=1e-5)) is None


def test_never_refuses_a_directory_that_holds_a_run(make_job):
    run = started(make_job(), steps_saved=False)
    with pytest.raises(ValueError, match="already holds a run and resume=never.*run.name=default-2"):
        run.find_start(make_job(resume="never"))


def test_files_that_are_not_a_runs_are_left_alone(make_job):
    job = make_job()
    run = directory(job)
    run.path.mkdir(parents=True)
    (run.path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match="holds files that are not a run's"):
        run.find_start(job)


def test_a_given_checkpoint_or_run_is_resumed_here_or_under_a_new_name(make_job):
    run = started(make_job())
    save(run, 2, loss=1.0)
    assert run.best == path_of(run.checkpoints, 2)
    assert run.find_start(make_job(resume=str(run.best))) == run.best
    branch = make_job(resume=str(run.path), run__name="branch")
    assert directory(branch).find_start(branch) == run.last


def test_a_given_checkpoint_does_not_go_into_another_run(make_job):
    run = started(make_job())
    other = make_job(run__name="other")
    started(other)
    with pytest.raises(ValueError, match="already holds another run"):
        directory(other).find_start(make_job(run__name="other", resume=str(run.last)))


def test_the_command_that_began_a_branch_goes_on_with_it(make_job):
    trunk = started(make_job())
    branch = make_job(resume=str(trunk.path), run__name="branch")

    def start(**changes) -> Path | None:
        run = directory(branch)
        found = run.find_start(make_job(resume=branch.resume, run__name="branch", **changes))
        run.open(branch, {})
        run.close()
        return found

    assert start() == trunk.last
    # Stopped before it had saved anything.
    assert start() == trunk.last
    # A step that the trunk has reached by now, or one behind it.
    own = save(directory(branch), 5)
    save(trunk, 9)
    assert start() == own
    assert directory(branch).checkpoint_for(branch.resume) == own
    with pytest.raises(ValueError, match="optim.lr: 0.003 there, 1e-05 here"):
        start(optim__lr=1e-5)
    # Another checkpoint than it was begun with is still another run's.
    with pytest.raises(ValueError, match="already holds another run"):
        directory(branch).find_start(make_job(resume=str(trunk.last), run__name="branch"))


def test_the_command_that_sent_a_run_back_goes_on_from_there(make_job):
    run = started(make_job())
    later = save(run, 6)
    given = path_of(run.checkpoints, 3)
    job = make_job(resume=os.path.relpath(given))

    def start() -> Path | None:
        here = directory(job)
        found = here.find_start(job)
        here.open(job, {})
        here.close()
        return found.resolve() if found else None

    assert start() == given
    # Stopped before it had saved anything: what lies behind is still of the course that was left.
    assert start() == given
    assert directory(job).last == directory(job).checkpoint_for("auto") == given
    own = save(run, 4)
    assert start() == own
    assert save(run, 6) == later
    assert start() == later
    # Nor does it need what it was sent back to any more.
    shutil.rmtree(given)
    assert start() == later


def test_a_damaged_origin_is_named(make_job):
    run = started(make_job())
    run.origin.write_text('{"step": []}')
    with pytest.raises(ValueError, match=r"\.origin\.json is damaged \(TypeError\): remove it"):
        run.find_start(make_job())


def test_a_checkpoint_that_was_being_replaced_is_found_again(make_job):
    run = started(make_job())
    path_of(run.checkpoints, 3).rename(run.checkpoints / ".aside-step-00000003-17")
    assert run.find_start(make_job()) == path_of(run.checkpoints, 3)


def test_a_given_checkpoint_of_another_model_is_refused(make_job):
    run = started(make_job())
    branch = make_job(resume=str(run.last), run__name="branch", model__hidden_size=64)
    with pytest.raises(ValueError, match="model.hidden_size: 32 there, 64 here"):
        directory(branch).find_start(branch)


def test_a_missing_checkpoint_is_named(make_job):
    job = make_job(resume="nowhere/last.ckpt")
    with pytest.raises(ValueError, match="resume=nowhere/last.ckpt: there is no checkpoint"):
        directory(job).find_start(job)


def test_two_jobs_do_not_share_a_directory(make_job):
    first = directory(make_job())
    first.open(make_job(), {})
    try:
        with pytest.raises(ValueError, match="in use by a job that is still running"):
            directory(make_job()).find_start(make_job())
    finally:
        first.close()
    assert directory(make_job()).find_start(make_job()) is None


def test_a_directory_that_cannot_be_made_is_named_with_a_way_out(tmp_path, make_job):
    (tmp_path / "file").write_text("")
    run = RunDirectory(tmp_path / "file" / "runs", "name")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\): set run.root"):
        run.check_writable()


def test_a_failed_job_takes_its_empty_directory_with_it(make_job):
    job = make_job()
    run = directory(job)
    run.open(job, {})
    run.close(failed=True)
    assert not run.path.exists()


def test_a_failed_job_keeps_what_it_found_or_made(make_job):
    job = make_job()
    run = started(job, steps_saved=False)
    run.open(job, {})
    run.close(failed=True)
    assert run.config.exists()

    job = make_job(run__name="other")
    run = directory(job)
    run.open(job, {})
    run.metrics.write_text("step\n1\n")
    run.close(failed=True)
    assert run.metrics.exists()
