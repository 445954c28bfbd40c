"""The whole job: phases of a run in one trace, rounds that stand for many, and everything as before afterwards."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from each import each
from torch import nn

from vram_guard import Budget, Job, TrainingStep, estimate, plan, trace
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.job import Change, Evaluation, Resuming, Saving
from vram_guard.simulate.memory import repeats
from vram_guard.simulate.tracing.run import run_step

MIB = 2**20
ROWS = torch.ones(4, 256)


def network(width=1024):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 256))


def loss(model, batch):
    return model(batch).square().mean()


def step_of(*parts, model=None, play=None, **changes):
    job = Job(play) if play else Job.of(*parts) if parts else None
    given = {"model": model or network(), "batch": ROWS, "loss": loss, "optimizer": torch.optim.Adam, "job": job}
    return TrainingStep(**{**given, **changes})


def forward(model, batch):
    return model(batch)


def rows_of(estimate):
    return {phase.name: phase for phase in estimate.phases}


def traced(play, size=64, **changes):
    return run_step(step_of(play=play, **changes), size, (8, 0))


# --- what a job is ----------------------------------------------------------------------------------------------------


def test_two_steps_are_what_a_step_without_a_job_is():
    alone, job = (run_step(step_of(play=play), 64, (8, 0)) for play in (None, lambda run: run.train()))
    assert (job.events, job.blocks, job.phases, job.work) == (alone.events, alone.blocks, alone.phases, alone.work)
    assert alone.at(64).phases == job.at(64).phases == ()


def test_phases_stand_in_the_order_of_the_run_with_their_own_peaks():
    timeline = trace(step_of(Evaluation(ROWS, forward, batch_size=3000, label="sanity"), Saving()))
    taken = timeline.at(1000)
    assert [(phase.name, phase.label) for phase in taken.phases] == [
        ("setup", ""),
        ("training", ""),
        ("validation", "sanity"),
        ("saving", ""),
        ("training", ""),
    ]
    curves = timeline.replay(1000, curve=True)
    starts = [stretch.start for stretch in timeline.stretches]
    assert len(starts) == len(taken.phases)
    for phase, (start, end) in zip(taken.phases, pairwise([*starts, len(timeline.events)]), strict=True):
        before = max(0, start - 1) if start else None
        since = slice(start if before is None else before, end)
        assert phase.peak_allocated == max(curves.allocated_curve[since])
        assert phase.peak_reserved == max(curves.reserved_curve[since])
    assert taken.peak_allocated == max(phase.peak_allocated for phase in taken.phases)
    assert taken.peak_reserved == max(phase.peak_reserved for phase in taken.phases)
    assert taken.peak_phase.name == "validation"
    assert taken.peak_phase.label == "sanity"
    assert taken.first_steps == (taken.phases[1].peak_allocated, taken.phases[1].peak_reserved)
    assert taken.first_steps[1] < taken.peak_reserved


def test_a_constant_validation_batch_stays_where_the_training_batch_grows():
    timeline = trace(step_of(Evaluation(ROWS, forward, batch_size=4096)))
    assert timeline.retrace is None
    small, large = (rows_of(timeline.at(size))["validation"] for size in (2, 5000))
    assert small.peak_allocated > 4096 * 1024 * 4
    grown = rows_of(trace(step_of(Evaluation(ROWS, forward))).at(5000))["validation"]
    assert grown.peak_allocated > large.peak_allocated > small.peak_allocated


@pytest.mark.parametrize("inference_mode", [False, True])
def test_an_evaluation_keeps_no_activations_and_the_model_trains_again(inference_mode):
    modes = []

    def run(model, batch):
        modes.append((model.training, torch.is_grad_enabled(), batch.shape[0]))
        return model(batch)

    model = network()
    model[2].eval()  # a part that its user has frozen
    taken = trace(step_of(Evaluation(ROWS, run, batch_size=4000, inference_mode=inference_mode), model=model)).at(8)
    assert set(modes) == set()  # lists that the user's code keeps are as before
    seen = []
    play = Job.of(Evaluation(ROWS, lambda model, batch: seen.append(None), batch_size=4000)).play

    def watched(run):
        with run.evaluating(inference_mode=inference_mode):
            assert not run.model.training
            assert not torch.is_grad_enabled()
        assert [module.training for module in run.model] == [True, True, False, True]
        play(run)

    traced(watched, model=model)
    assert [module.training for module in model] == [True, True, False, True]
    activations = 4000 * (256 + 1024 + 1024) * 4
    held = sum(taken.breakdown[name] for name in ("parameters", "optimizer_states"))
    assert rows_of(taken)["validation"].peak_allocated < held + 1.2 * activations + 20 * MIB


def test_an_evaluation_runs_in_the_steps_precision():
    kinds = {}

    def play(run):
        run.train()
        with run.phase("validation"), run.evaluating(), run.autocast():
            kinds[run.batch_size] = run.model(run.load(ROWS)).dtype
        assert kinds == {8: torch.bfloat16}

    traced(play, 8, precision="bf16-mixed")
    assert kinds == {}


def guesses(model, batch):
    outputs = model(batch)
    return outputs if outputs.sum() > 0 else outputs.argmax(-1)


def tiers(estimate):
    return {(phase.name, phase.step): phase.tier for phase in estimate.phases}


def test_a_tier_is_of_the_phase_that_guesses_and_counts_where_that_decides():
    small, large = (estimate(step_of(Evaluation(ROWS, guesses, batch_size=size)), 64) for size in (64, 60_000))
    for found in (small, large):
        assert set(tiers(found).values()) == {"symbolic", "partly symbolic"}
        assert {name for (name, _), tier in tiers(found).items() if tier != "symbolic"} == {"validation"}
    assert (small.tier, large.tier) == ("symbolic", "partly symbolic")
    exact = estimate(step_of(Evaluation(ROWS, forward, batch_size=64)), 64)
    assert (exact.tier, exact.peak_reserved) == ("symbolic", small.peak_reserved)
    law = trace(step_of(Evaluation(ROWS, guesses, batch_size=64)))
    most = law.max_batch_size("1GiB")
    assert most == trace(step_of(Evaluation(ROWS, forward, batch_size=64))).max_batch_size("1GiB")
    assert law.at(most).fits(Budget.of("1GiB"))

    def guessed(model, batch):
        return guesses(model, batch).float().square().mean() + loss(model, batch)

    training = estimate(step_of(Evaluation(ROWS, forward, batch_size=64), loss=guessed), 64)
    assert training.tier == "partly symbolic"
    assert tiers(training)["validation", 2] == "symbolic"
    assert estimate(step_of(loss=guessed), 64).tier == "partly symbolic"


# --- rounds -----------------------------------------------------------------------------------------------------------

CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16 * 16, 10)
)


def rounds_of(count, run, batch, *, repeated, join=None):
    def play(job):
        job.train()
        with job.phase("validation"), job.evaluating():
            collected = []
            for number in range(2 if repeated else count):
                with job.repeat(count - 1) if repeated and number else contextlib.nullcontext():
                    one = job.load(batch)
                    collected.append(run(job.model, one))
                    del one
            if join is not None:
                join(collected)
            collected.clear()
        job.train(1)

    return play


@each(
    ("run", "rows", "join"),
    [
        (forward, 301, None),
        (forward, 301, torch.cat),
        (lambda model, batch: model[:3](batch), 64, torch.cat),
        (lambda model, batch: [model[:3](batch), model(batch)], 301, None),
        (lambda model, batch: model(batch).mean(), 64, torch.stack),
    ],
)
def test_a_repeated_round_is_what_all_rounds_are(run, rows, join):
    """Allocated and reserved, in every phase: what is collected lies where it would, and is joined in full."""
    batch = torch.ones(rows, 3, 16, 16)
    changes = {"model": CONVOLUTIONS, "batch": torch.ones(2, 3, 16, 16)}
    all_rounds, repeated = (
        traced(rounds_of(12, run, batch, repeated=repeated, join=join), 16, **changes).at(16)
        for repeated in (False, True)
    )
    assert [phase[:1] + phase[3:5] for phase in repeated.phases] == [p[:1] + p[3:5] for p in all_rounds.phases]


@pytest.mark.parametrize(("drops", "traced_rounds"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("join", [lambda old, new: torch.cat([old, new]), lambda old, new: old + new])
@pytest.mark.parametrize("finish", [torch.Tensor.cpu, torch.Tensor.exp])
def test_what_is_made_at_one_line_and_grows_at_another_is_as_large_as_after_all_rounds(
    join, traced_rounds, drops, finish
):
    def play(count, repeats):
        def played(run):
            run.train()
            with run.phase("validation"), run.evaluating():
                joined = None
                for number in range(count):
                    with run.repeat(repeats) if number == count - 1 else contextlib.nullcontext():
                        outputs = run.model(run.load(torch.ones(1000, 256)))
                        joined = outputs.clone() if joined is None else join(joined, outputs)
                        if drops:
                            del outputs
                finish(joined)

        return played

    all_rounds, short = traced(play(20, 1)), traced(play(traced_rounds, 21 - traced_rounds))
    found, true = (rows_of(timeline.at(64))["validation"].peak_allocated for timeline in (short, all_rounds))
    grows = true > rows_of(traced(play(5, 1)).at(64))["validation"].peak_allocated
    unknown = grows and finish is torch.Tensor.exp  # as large as in the trace
    assert found < true if unknown else found == true
    assert (short.tier == "formula") is unknown


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "states", "fresh"), [(torch.optim.Adam, 2, 0), (torch.optim.Adagrad, 1, 1)])
def test_a_checkpoint_on_the_gpu_lies_beside_what_it_is_loaded_into(optimizer, states, fresh):
    """Torch's own load_state_dict: Adam takes the loaded states for its own, Adagrad's fresh ones lie beside them."""
    weights = 2 * 256 * 1024 * 4
    taken = {place: rows_of(trace(step_of(Resuming(place), optimizer=optimizer)).at(8)) for place in ("cpu", "cuda")}
    for place, copies in (("cpu", 1 + states + fresh), ("cuda", 2 + states + fresh)):
        assert taken[place]["resuming"].peak_allocated == pytest.approx(copies * weights, rel=0.02)
    # The counts of steps of four parameters stay where they were loaded.
    assert taken["cuda"]["training"].peak_allocated == taken["cpu"]["training"].peak_allocated + 4 * 512


def test_saving_copies_what_the_script_copies():
    plain, copied = (
        rows_of(trace(step_of(Saving(state))).at(8))["saving"]
        for state in (None, lambda model, _optimizer: [tensor.clone() for tensor in model.state_dict().values()])
    )
    weights = sum(p.numel() * 4 for p in network().parameters())
    assert copied.peak_allocated - plain.peak_allocated == pytest.approx(weights, rel=0.01)
    assert copied.source.startswith("unit/test_job.py:")


# --- schedules --------------------------------------------------------------------------------------------------------


def unfreeze(model, optimizer):
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def test_a_layer_that_is_unfrozen_later_counts():
    model = network(8192)
    model[0].requires_grad_(False)
    step = step_of(
        Change(unfreeze, label="epoch 5"),
        model=model,
        optimizer=lambda parameters: torch.optim.Adam([p for p in parameters if p.requires_grad]),
    )
    taken = trace(step).at(8)
    before, after = (phase.peak_allocated for phase in taken.phases[1:3])
    weights = 256 * 8192 * 4
    assert after - before == pytest.approx(4 * weights, rel=0.3)  # gradient, two states, temporaries of the step
    assert taken.phases[2].label == "epoch 5"
    assert not any(p.requires_grad for p in model[0].parameters())
    changed = run_step(step, 8, (8, 0))
    assert sum(changed.blocks[e].category == "gradients" for e in changed.events if e >= 0) == 2 * 2 + 4 * 2 + 4


def test_a_schedule_changes_fields_of_the_step():
    step = step_of(Change(label="large images", step={"batch": lambda size: torch.ones(4 * size, 256)}))
    taken = trace(step).at(1000)
    _setup, first, later, *_ = taken.phases
    assert later.label == "large images"
    assert later.peak_allocated > 2 * first.peak_allocated


# --- everything as before ---------------------------------------------------------------------------------------------

KEPT = []
TOTAL = 0.0


class Collector:
    """A metric as users write them."""

    def __init__(self):
        self.outputs = []
        self.calls = 0

    def __call__(self, value):
        self.outputs.append(value)
        self.calls += 1


def test_the_users_objects_are_as_they_were():
    model, collector, seen, counted = network(), Collector(), {}, 0
    model.register_buffer("average", torch.zeros(256))
    model[0].register_forward_hook(lambda _module, _inputs, out: seen.update(out=out))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()

    def run(model, batch):
        nonlocal counted
        global TOTAL  # noqa: PLW0603
        counted += 1
        collector(model(batch))
        KEPT.append(batch)
        TOTAL = TOTAL + batch.sum()
        model.average.mul_(0.9)

    trace(step_of(Resuming("cuda"), Evaluation(ROWS, run), Saving(), Change(unfreeze_all), model=model))
    assert (collector.outputs, collector.calls, seen, counted, KEPT, TOTAL) == ([], 0, {}, 0, [], 0.0)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def unfreeze_all(model, _optimizer):
    model.requires_grad_(True)


# --- bad input --------------------------------------------------------------------------------------------------------


def within(block, run=lambda: None):
    with block:
        run()


@each(
    "play",
    [
        lambda _run: None,
        lambda run: run.train(0),
        lambda run: run.train(momentum=1),
        lambda run: run.phase("eval").__enter__(),
        lambda run: run.repeat(0).__enter__(),
        lambda run: within(run.repeat(2), lambda: within(run.repeat(2))),
        lambda run: within(run.phase("test"), run.train),
    ],
)
def test_a_job_that_makes_no_sense_is_an_error(play):
    with pytest.raises(InvalidInputError):
        traced(play)


@each(
    ("make", "said"),
    [
        (lambda: Job(3), "callable"),
        (lambda: Job.of(), "has parts"),
        (lambda: Job.of(3), "callables"),
        (lambda: Evaluation(ROWS, None), "callable"),
        (lambda: Evaluation(ROWS, forward, batches=0), "batches"),
        (lambda: Evaluation(ROWS, forward, batch_size=0), "batch_size"),
        (lambda: Evaluation(ROWS, forward, keeps="some"), "keeps"),
        (lambda: Evaluation(ROWS, forward, name="evaluation"), "name must be one of"),
        (lambda: Evaluation(ROWS, forward, finish=torch.cat), "keeps="),
        (lambda: Resuming("disk"), "map_location"),
        (lambda: step_of(model=network(), job=lambda run: run.train()), "job must be a Job"),
    ],
)
def test_values_that_make_no_sense_are_errors_before_any_work(make, said):
    with pytest.raises(InvalidInputError, match=said):
        make()


def test_the_users_own_error_reaches_the_caller():
    class TheirsError(Exception):
        pass

    def play(run):
        run.train()
        raise TheirsError("theirs")

    model = network()
    with pytest.raises(TheirsError, match="theirs"):
        trace(step_of(play=play, model=model))
    assert not any(p.is_meta for p in model.parameters())
    with pytest.raises(UnsupportedStepError):
        trace(step_of(Saving(), loss=lambda _model, _batch: None))


# --- memory that grows ------------------------------------------------------------------------------------------------


def line_of(text):
    """The place of a line of this file, as a report names it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"unit/test_job.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


class Cache:
    """Masks by the number of the step, as some attention code keeps them."""

    def __init__(self):
        self.step = 0
        self.masks = {}

    def mask(self, batch):
        self.step += 1
        self.masks[self.step] = batch * 2  # the cache
        return self.masks[self.step]


def leaking(kind):
    model, collector, cache, total, activations = network(), Collector(), Cache(), None, []
    if kind == "hook":
        model[1].register_forward_hook(lambda _module, _inputs, out: activations.append(out))

    def run(model, batch):
        nonlocal total
        inputs = cache.mask(batch) if kind == "cache" else batch
        outputs = model(inputs)  # the outputs
        value = outputs.square().mean()  # the loss
        if kind == "losses":
            KEPT.append(value)
        elif kind == "metric":
            collector(outputs.detach())
        elif kind == "totals":
            penalty = outputs.exp().sum()  # the penalty
            total = penalty if total is None else total + penalty
        return value

    return step_of(model=model, loss=run)


@each(
    ("kind", "line", "per_step", "name"),
    [
        ("losses", "# the loss", 512, "KEPT"),
        ("metric", "# the outputs", 1000 * 256 * 4, "collector.outputs"),
        ("totals", "# the penalty", 1000 * 256 * 4, "total"),
        ("hook", "# the outputs", 1000 * 1024 * 4, "activations"),
        ("cache", "# the cache", 1000 * 256 * 4, "cache.masks"),
    ],
)
def test_memory_that_grows_from_step_to_step_is_told_with_its_line(kind, line, per_step, name):
    timeline = trace(leaking(kind))
    taken = timeline.at(1000)
    assert [(leak.bytes_per_step, leak.source, leak.kept_in) for leak in taken.leaks] == [
        (per_step, line_of(line), name)
    ]
    assert timeline.retrace is None
    assert not KEPT
    budget = Budget.of(taken.peak_reserved + 10 * per_step, margin=0)
    assert taken.steps_until_full(budget) == 13


@pytest.mark.parametrize(
    ("keeps", "zero_grad"), [("nothing", "after_step"), ("loss", "before_backward"), ("outputs", "after_step")]
)
def test_a_training_that_keeps_nothing_has_no_leak(keeps, zero_grad):
    step = leaking("none").with_(keeps=keeps, zero_grad=zero_grad, accumulate=2)
    taken = estimate(step, 1000)
    assert taken.leaks == ()
    assert taken.steps_until_full(Budget.of("1GiB")) is None


@pytest.mark.parametrize(("steps", "fits"), [(None, True), (13, True), (14, False)])
def test_what_grows_has_to_fit_until_the_last_step(steps, fits):
    job = Job(lambda run: run.train(), steps=steps)
    step = leaking("metric").with_(job=job)
    at_first = trace(step).at(1000)
    budget = Budget.of(at_first.peak_reserved + 10 * at_first.leaks[0].bytes_per_step, margin=0)
    made = plan(step, 1000, budget, allow=())
    assert made.fits is made.fits_as_written is fits
    assert at_first.fits(budget) is fits
    assert made.estimate.leaks == at_first.leaks


def test_of_many_rounds_only_what_they_leave_behind_is_written_down(monkeypatch):
    batch = torch.ones(300, 3, 16, 16)
    changes = {"model": CONVOLUTIONS, "batch": torch.ones(2, 3, 16, 16)}
    plays = [rounds_of(30, forward, batch, repeated=repeated) for repeated in (False, True)]
    all_rounds = traced(plays[0], 16, **changes)
    monkeypatch.setattr(repeats, "EVENTS_WRITTEN", 0)
    short = traced(plays[1], 16, **changes)
    assert len(short.events) < 0.6 * len(all_rounds.events)
    assert short.at(16).peak_allocated == all_rounds.at(16).peak_allocated
