"""Plans, reports and commands for a step with a job."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from vram_guard import Budget, Job, TrainingStep, assert_fits, cli, plan, trace
from vram_guard.errors import DoesNotFitError
from vram_guard.job import Evaluation, Saving
from vram_guard.plan import PlanOptions
from vram_guard.report.as_json import as_dict
from vram_guard.report.html import html_report
from vram_guard.report.text import render

ROWS = torch.ones(4, 256)
MIB = 2**20


def step_of(validation, **changes):
    torch.manual_seed(0)
    return TrainingStep(
        model=nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)),
        batch=ROWS,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.Adam,
        job=None if validation is None else Job.of(validation, Saving()),
        **changes,
    )


def validation_of(batch_size, **changes):
    return Evaluation(ROWS, lambda model, batch: model(batch), batch_size=batch_size, batches=10, **changes)


@pytest.fixture(scope="module")
def fitting():
    return plan(step_of(validation_of(4000)), 1000, "200MiB", margin=0)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_step_that_fits_is_followed_with_its_job(fitting):
    assert fitting.fits
    assert not fitting.changed
    assert [phase.name for phase in fitting.estimate.phases] == [
        "setup",
        "training",
        "validation",
        "saving",
        "training",
    ]
    alone = plan(step_of(None), 1000, "200MiB", margin=0)
    assert fitting.estimate.first_steps[1] == alone.estimate.peak_reserved < fitting.estimate.peak_reserved
    assert fitting.before == fitting.estimate


def test_candidates_are_traced_without_the_job_and_the_winner_with_it():
    lines = []
    made = plan(step_of(validation_of(4000)), 40_000, "200MiB", margin=0, allow=["accumulate"], progress=lines.append)
    assert made.fits
    assert made.splits > 1
    assert made.estimate.phases
    assert made.before.phases
    alone = plan(step_of(None), 40_000, "200MiB", margin=0, allow=["accumulate"])
    assert (made.splits, made.recipe) == (alone.splits, alone.recipe)


def test_validation_grows_with_the_loader_whose_batch_size_it_has():
    step = step_of(validation_of(None, keeps="all"))
    made = plan(step, 64, "1GiB", margin=0, grow=True)
    assert made.fits
    assert made.micro_batch_size > 64
    assert made.estimate.phases == trace(step).at(made.micro_batch_size).phases


def test_a_validation_batch_that_is_too_large_is_said_with_the_largest_that_fits():
    made = plan(step_of(validation_of(40_000, label="all")), 1000, "200MiB", margin=0, allow=["accumulate"])
    assert not made.fits
    assert not made.changed
    said = "\n".join(made.reasons)
    largest = int(said.partition("With batches of ")[2].partition(" ")[0])
    budget = Budget.of("200MiB", margin=0)
    below, above = (trace(step_of(validation_of(size))).at(1000).fits(budget) for size in (largest, largest + 1))
    assert (below, above) == (True, False)


def test_where_the_job_does_not_fit_it_counts_in_the_search():
    """In mixed precision validation takes half; the step by itself would have stayed as it is."""
    step = step_of(validation_of(20_000))
    needed = trace(step).at(1000).peak_reserved
    assert trace(step.with_(job=None)).at(1000).peak_reserved < 0.7 * needed
    made = plan(step, 1000, Budget.of(int(0.8 * needed), margin=0), allow=["precision"])
    assert made.fits
    assert made.precision == "bf16-mixed"
    assert made.estimate.peak_reserved <= 0.8 * needed < made.before.peak_reserved


def test_batches_of_an_evaluation_are_not_cut_with_those_of_the_training():
    step = step_of(Evaluation(ROWS, lambda model, batch: model(batch)))
    made = plan(step, 20_000, "240MiB", margin=0, allow=["accumulate"])
    assert made.splits > 1
    validation = next(phase for phase in made.estimate.phases if phase.name == "validation")
    assert validation.peak_allocated > 20_000 * (256 + 1024 + 1024) * 4


def test_where_the_job_fails_under_a_change_another_one_is_taken():
    def run(model, batch):
        if torch.is_autocast_enabled("cuda"):
            raise TypeError("no half precision here")
        return model(batch)

    step = step_of(Evaluation(ROWS, run, batch_size=8))
    made = plan(step, 20_000, "240MiB", margin=0, allow=["precision", "accumulate"], pin={"checkpoint": "none"})
    assert made.fits
    assert made.precision == "32-true"


def test_a_check_holds_the_whole_job_against_the_budget():
    assert assert_fits(step_of(None), 1000, "60MiB", margin=0).phases == ()
    with pytest.raises(DoesNotFitError, match="validation"):
        assert_fits(step_of(validation_of(4000)), 1000, "60MiB", margin=0)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reports_show_the_peak_of_each_phase(fitting):
    text = render(fitting, width=100)
    table = text.partition("Peak of each phase")[2]
    for name in ("setup", "training, step 2", "validation, after step 2", "saving, after step 2", "training, step 3"):
        assert name in table
    validation = fitting.estimate.phases[2]
    assert f"{validation.peak_reserved / MIB:.2f} MiB" in table
    page = html_report(fitting)
    assert "Peak of each phase" in page
    found = as_dict(fitting)["estimate"]
    assert json.loads(json.dumps(found["phases"]))[2]["peak_reserved"] == validation.peak_reserved
    assert found["peak"]["phase"] == "validation"
    assert "Peak of each phase" not in render(plan(step_of(None), 64, "200MiB"))


def test_reports_say_what_grows_and_when_the_budget_is_full():
    kept = []

    def loss(model, batch):
        outputs = model(batch)
        kept.append(outputs.detach())
        return outputs.square().mean()

    estimate = trace(step_of(None).with_(loss=loss)).at(1000)
    text = render(estimate, budget=Budget.of("1GiB", margin=0), width=120)
    assert "1000.00 KiB more with every step: 2 (Linear), unit/test_job_plan.py:" in text
    assert f"the budget is full after {estimate.steps_until_full(Budget.of('1GiB', margin=0))} steps" in text
    assert as_dict(estimate)["estimate"]["leaks"] == [estimate.leaks[0]._asdict()]


# --- commands ---------------------------------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn
from vram_guard import Job, TrainingStep
from vram_guard.job import Evaluation

rows = torch.ones(4, 256)

def step():
    return TrainingStep(
        lambda: nn.Linear(256, 256), rows, lambda model, batch: model(batch).sum(), torch.optim.Adam,
        job=Job.of(Evaluation(rows, lambda model, batch: model(batch), batch_size=4000)),
    )
"""


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--step", "train.py:step", "--set", "batch_size=8", "--budget", "1GiB"],
        ["estimate", "--model", "train.py:step", "--batch", "8", "--budget", "1GiB"],
    ],
)
def test_commands_show_the_phases_of_a_file_with_a_job(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 0
    assert "validation, after step 2" in capsys.readouterr().out


def test_validation_that_a_grown_batch_makes_too_large_is_said_with_its_size():
    step, alone = (
        plan(step_of(validation), 64, "1GiB", margin=0, grow=True, options=PlanOptions(target_utilization=1.0))
        for validation in (validation_of(None, keeps="all"), None)
    )
    assert 64 < step.micro_batch_size < alone.micro_batch_size
    assert f"in place of {alone.micro_batch_size}, validation fits" in "\n".join(step.reasons)


def test_a_smaller_batch_that_is_proposed_fits_with_all_that_is_collected():
    large = validation_of(40_000, keeps="all")
    found = plan(step_of(large), 64, "800MiB", margin=0, allow=[])
    size = int("\n".join(found.reasons).partition("With batches of ")[2].partition(" ")[0])
    job = Job.of(large, Saving())

    def fits(count):
        return trace(step_of(large).with_(job=job.with_evaluation(large, count))).at(64).fits(found.budget)

    assert fits(size)
    assert not fits(2 * size)
