"""What would make a fine-tuning fit: every claim holds under the closed form itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vram_guard.closed_form.folder import Component
from vram_guard.closed_form.recommend import combined_savings, individual_savings
from vram_guard.closed_form.tuning import Shape, Tuning
from vram_guard.closed_form.weights import Weights

components = st.integers(0, 10**10).map(lambda count: Component("x", {}, Weights({"F32": count})))
tunings = st.builds(
    Tuning,
    trained=st.tuples(components),
    frozen=st.lists(components, max_size=2).map(tuple),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    sample_numbers=st.integers(0, 10**6),
    shape=st.builds(Shape, st.integers(1, 40), st.integers(1, 4096), st.integers(1, 4096)),
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


@given(tunings, amounts)
def test_every_measure_saves_something(tuning, usable):
    assert all(one.tuning.total < tuning.total for one in individual_savings(tuning))


@given(tunings, amounts)
def test_the_largest_batch_is_exact(tuning, usable):
    from dataclasses import replace

    most = tuning.largest_batch(usable)
    if most:
        assert replace(tuning, batch=most).total <= usable
    if replace(tuning, batch=2).total > replace(tuning, batch=1).total:
        assert replace(tuning, batch=most + 1).total > usable
