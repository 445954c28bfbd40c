"""What would make a fine-tuning fit: every claim holds under the closed form itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from vram_guard.closed_form._weights import Weights
from vram_guard.closed_form.folder import Component
from vram_guard.closed_form.recommend import combined_savings, individual_savings
from vram_guard.closed_form.tuning import TransformerShape, Tuning
from vram_guard.step import LARGEST_BATCH

components = st.integers(0, 10**10).map(lambda count: Component("x", {}, Weights({"F32": count})))
tunings = st.builds(
    Tuning,
    trained=st.tuples(components),
    frozen=st.lists(components, max_size=2).map(tuple),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    sample_numbers=st.integers(0, 10**6),
    shape=st.builds(TransformerShape, st.integers(1, 40), st.integers(1, 4096), st.integers(1, 4096)),
)
amounts = st.integers(0, 10**12)


@given(tunings, amounts)
def test_what_is_taken_together_fits_and_nothing_of_it_is_needless(tuning, usable):
    taken = combined_savings(tuning, usable)
    if tuning.total <= usable:
        assert taken == ()
    if not taken:
        return
    assert taken[-1].fits(usable)
    assert not any(one.fits(usable) for one in taken[:-1])
    assert [one.tuning.total for one in taken] == sorted((one.tuning.total for one in taken), reverse=True)
    if len(taken) > 1:
        alone = {one.key: one for one in individual_savings(tuning)}
        assert not any(one.key in alone and alone[one.key].fits(usable) for one in taken)


#: What each measure changes, written down a second time.
CHANGES = {
    "checkpoint": {"checkpointed": True},
    "offload_frozen": {"frozen_on_host": True},
    "accumulate": {"batch": 1},
    "8bit": {"state_bytes": 1},
    "offload_optimizer": {"states_on_host": True},
    "half": {"dtype": "bfloat16"},
}


def under(tuning, keys):
    """Bytes of the training under these measures."""
    return replace(tuning, **{name: value for key in keys for name, value in CHANGES[key].items()}).total


def adamw(parameters, batch=1, shape=None):
    """A training of float32 weights with small activations."""
    component = Component("x", {}, Weights({"F32": parameters}))
    return Tuning((component,), (), batch, "float32", shape=shape or TransformerShape(2, 8, 8))


@given(tunings, st.floats(0, 1))
@example(adamw(10**6, batch=4), 0.6)
def test_none_of_what_is_taken_can_be_left_out(tuning, share):
    usable = int(share * tuning.total)
    keys = [one.key for one in combined_savings(tuning, usable)]
    for left_out in keys:
        assert under(tuning, [key for key in keys if key != left_out]) > usable
    if not keys and tuning.total > usable:
        assert under(tuning, CHANGES) > usable or not tuning.complete


def test_what_the_last_measure_makes_needless_is_not_taken():
    tuning = adamw(10**6, batch=4)
    # Checkpointing, one sample at a time and 8-bit states come first and are not enough; without any states all fits.
    usable = under(tuning, ["offload_optimizer"])
    assert under(tuning, ["checkpoint", "accumulate", "8bit"]) > usable
    taken = combined_savings(tuning, usable)
    assert [one.key for one in taken] == ["offload_optimizer"]
    assert taken[0].tuning.total == usable
    assert taken[0].fits(usable)
    assert not taken[0].fits(usable - 1)


def test_of_two_measures_of_which_one_suffices_the_milder_is_taken():
    tuning = adamw(10**6, batch=4, shape=TransformerShape(4, 64, 64))
    either = ["checkpoint", "8bit"], ["accumulate", "8bit"]
    usable = max(under(tuning, keys) for keys in either)
    assert min(under(tuning, ["8bit"]), under(tuning, ["checkpoint", "accumulate"])) > usable
    assert [one.key for one in combined_savings(tuning, usable)] == ["checkpoint", "8bit"]


def test_nothing_is_recommended_to_fit_where_activations_are_not_known():
    unknown = replace(adamw(10**6), shape=None)
    assert under(unknown, CHANGES) < unknown.total
    assert combined_savings(unknown, under(unknown, CHANGES)) == ()


def test_the_largest_batch_of_a_tuning_is_one_that_a_step_may_have():
    tiny = Tuning((), (), 1, "bfloat16", sample_numbers=1)
    assert tiny.largest_batch(10**11) == LARGEST_BATCH
    assert tiny.largest_batch(2 * LARGEST_BATCH - 2) == LARGEST_BATCH - 1
    assert tiny.largest_batch(1) == 0


@given(tunings, amounts)
def test_every_measure_saves_something(tuning, usable):
    assert all(one.tuning.total < tuning.total for one in individual_savings(tuning))


@given(tunings, amounts)
def test_the_largest_batch_is_exact(tuning, usable):
    most = tuning.largest_batch(usable)
    if most:
        assert replace(tuning, batch=most).total <= usable
    if replace(tuning, batch=2).total > replace(tuning, batch=1).total:
        assert most == LARGEST_BATCH or replace(tuning, batch=most + 1).total > usable
