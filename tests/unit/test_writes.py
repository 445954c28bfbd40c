"""What functions write to: what was there before is told, what they make for themselves is not."""

from __future__ import annotations

import collections
import cProfile
import functools
import gc
import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vram_guard.forks.fork import run_in_fork
from vram_guard.state.collector import ObjectsBefore, collector_paused
from vram_guard.state.writes import Writes

KEPT: dict[str, Any] = {}
COUNTS = {"n": 0}
ARRAYS: dict[str, Any] = {"calls": np.zeros(1), "pair": (0, np.zeros(1))}
HELPERS = types.SimpleNamespace(calls=0, seen=[1], table={"calls": 0}, numbers=itertools.count(), words={"a"})
QUEUE = collections.deque([1, 2])
COUNT = 0
SCHEDULE = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))


class Kind:
    calls = 0

    def __init__(self) -> None:
        self.parts: list[int] = []


@functools.cache
def cached() -> int:
    return 1


def attribute() -> None:
    HELPERS.calls += 1


def attribute_by_name() -> None:
    setattr(HELPERS, "calls", 3)  # noqa: B010 - that is the case


def attribute_of_class() -> None:
    Kind.calls += 1


def attribute_of_function() -> None:
    attribute.calls = 1  # type: ignore[attr-defined]


def attribute_that_is_gone() -> None:
    HELPERS.gone = 1
    del HELPERS.gone


def item_under_another_name() -> None:
    table = HELPERS.table
    table["calls"] += 1


def item_of_call() -> None:
    vars(HELPERS)["calls"] = 1


def variable() -> None:
    global COUNT  # noqa: PLW0603 - that is the case
    COUNT += 1


def item_of_list() -> None:
    HELPERS.seen[0] = 1


def method_of_list() -> None:
    HELPERS.seen.append(1)


def method_of_queue() -> None:
    QUEUE.rotate()


def method_of_set() -> None:
    HELPERS.words.discard("b")


def iterator() -> None:
    next(HELPERS.numbers)


def hits_of_cache() -> None:
    cached.cache_info()


def object_of_library() -> None:
    with warnings.catch_warnings(action="ignore"):
        SCHEDULE.step()


def either() -> None:
    one: Any = Kind()
    one.parts = []
    one = HELPERS
    one.parts = []


def of_its_own() -> None:
    made, found = Kind(), {}
    made.parts.append(1)
    made.parts[0] = 2
    made.calls = 1
    found["number"] = 1
    found["parts"] = made.parts
    names = {name: at for at, name in enumerate("ab")}
    names.update(c=3)
    numbers = iter([1])
    next(numbers)
    next(iter(HELPERS.table))


def of_tensors() -> None:
    values = torch.zeros(3)
    values[0] = 1
    values.requires_grad = True


def not_set() -> None:
    if HELPERS.calls < 0:
        made: dict[str, int] = {}
        made["a"] = 1


def set_again_before() -> None:
    found = HELPERS.table
    found = dict(found)
    found["a"] = 1
    for one in (Kind(), Kind()):
        one.parts = []
    for one in [Kind()]:
        one.parts = []


def in_loop() -> None:
    for one in (HELPERS, HELPERS):
        one.parts = []


def reads() -> None:
    len(HELPERS.seen), HELPERS.table.get("calls"), QUEUE.count(1), Kind.calls


def written(function: Callable[[], None], known: set[Any]) -> list[tuple[str, str]]:
    with collector_paused(), Writes(ObjectsBefore()) as writes:
        function()
    return list(writes.elsewhere(known))


TOLD = [
    *(attribute, attribute_by_name, attribute_of_class, attribute_of_function, attribute_that_is_gone, item_of_call),
    *(item_under_another_name, variable, item_of_list, method_of_list, method_of_queue, method_of_set, iterator),
    *(hits_of_cache, object_of_library, either, in_loop),
]


def test_what_was_there_before_is_told_with_the_functions_name() -> None:
    silent = [function.__name__ for function in TOLD if function.__name__ not in dict(written(function, set()))]
    assert not silent


def test_what_a_function_makes_for_itself_or_only_reads_is_not() -> None:
    told = {
        function.__name__: written(function, set())
        for function in (of_its_own, of_tensors, not_set, set_again_before, reads)
    }
    assert not any(told.values()), told


def test_an_object_of_a_library_with_the_number_of_one_that_died_is_not() -> None:
    """Each ``with torch.no_grad():`` makes an object that writes to itself, where another one was before."""

    def without_gradients() -> None:
        for _call in range(4):
            with torch.no_grad():
                pass

    died = [torch.no_grad() for _object in range(2_000)]
    numbers = set(map(id, died))
    with collector_paused():
        before = ObjectsBefore()
        died.clear()
        assert {id(torch.no_grad()) for _call in range(4)} & numbers, "no number is used again here"
        with Writes(before) as writes:
            without_gradients()
    assert not list(writes.elsewhere(set()))


def test_what_is_compared_elsewhere_is_not() -> None:
    known = {id(HELPERS), id(HELPERS.seen), id(HELPERS.table), (id(globals()), "COUNT")}
    told = {
        function.__name__: written(function, known)
        for function in (attribute, item_of_list, method_of_list, item_under_another_name, variable)
    }
    assert not any(told.values()), told


def test_functions_that_are_called_are_followed() -> None:
    def outer() -> None:
        attribute()

    assert written(outer, set()) == [("attribute", "HELPERS.calls")]


def test_nothing_is_frozen_afterwards() -> None:
    """What is made later is let go of."""
    assert written(attribute, set())
    assert not gc.get_freeze_count()


def test_a_dictionary_that_held_numbers_alone_and_one_that_was_empty_were_there_before() -> None:
    def fills() -> None:
        KEPT["mask"] = [1]

    KEPT.clear()
    assert written(fills, set()) == [("fills", "KEPT['mask']")]
    KEPT.clear()
    assert run_in_fork(lambda _progress: written(fills, set())) == [("fills", "KEPT['mask']")]


def test_what_is_new_has_a_number_that_may_be_an_older_ones() -> None:
    """Dictionaries that die leave their numbers to new ones at once."""
    dying = [{"sums": [number]} for number in range(20_000)]
    staying = [{"sums": [number]} for number in range(20)]
    with collector_paused():
        before = ObjectsBefore()
        numbers = set(map(id, dying))
        dying.clear()
        made = [{"sums": [number]} for number in range(20)]
        assert numbers & set(map(id, made))
        assert not any(one in before for one in made)
        assert all(one in before for one in staying)


def test_lists_that_are_written_to_and_let_go_of_are_not_kept() -> None:
    class Large:
        pass

    with collector_paused():
        holder = types.SimpleNamespace(found=[Large()])
        before = ObjectsBefore()
        assert holder.found in before
        alive = weakref.ref(holder.found[0])
        holder.found = []
        assert alive() is None


def test_new_dictionaries_are_not_kept() -> None:
    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def fills() -> None:
        made: dict[str, Any] = dict.fromkeys(["one"], Large())
        made.update(other=Large())
        kept.extend(map(weakref.ref, made.values()))

    with collector_paused():
        before = ObjectsBefore()
        with Writes(before) as writes:
            fills()
        assert [one() for one in kept] == [None, None]
    assert not list(writes.elsewhere({id(kept)}))


def test_the_same_in_a_copy_of_the_process() -> None:
    staying = [{"sums": [number]} for number in range(20)]

    def work(_progress: object) -> tuple[bool, bool, bool]:
        with collector_paused():
            before = ObjectsBefore()
            made = [{"sums": [number]} for number in range(20)]
            gc.collect()
            return all(one in before for one in staying), any(one in before for one in made), made[0] in before

    assert run_in_fork(work) == (True, False, False)


def test_arrays_in_what_the_collector_does_not_know() -> None:
    def counts() -> None:
        ARRAYS["calls"][0] += 1

    def counts_in_pair() -> None:
        ARRAYS["pair"][1][0] += 1

    def of_its_own() -> None:
        made = np.zeros(2)
        made[0] += 1

    assert written(counts, set())
    assert written(counts_in_pair, set())
    assert not written(of_its_own, set())
    assert run_in_fork(lambda _progress: bool(written(counts, set())) and not written(of_its_own, set()))


def test_a_name_that_is_bound_in_another_way_too() -> None:
    def nested() -> None:
        def inner() -> Any:
            COUNTS = {}  # noqa: N806 - it hides the module's
            return len(COUNTS)

        inner()
        COUNTS["n"] += 1

    def imported() -> None:
        try:
            import collections as found
        except ImportError:
            found = {}  # type: ignore[assignment]
        found.counted_here = 1  # type: ignore[attr-defined]

    def generates() -> Any:
        made: dict[str, int] = {}
        while True:
            yield made
            made["n"] = 1

    generator = generates()
    next(generator)
    assert written(nested, set())
    assert written(imported, set())
    assert written(lambda: generator.send(None), set())


def test_functions_in_threads_and_without_source() -> None:
    def in_a_thread() -> None:
        thread = threading.Thread(target=attribute)
        thread.start()
        thread.join()

    space: dict[str, Any] = {"HELPERS": HELPERS}
    exec(compile("def made():\n    HELPERS.calls = 1", "/home/somebody/made.py", "exec"), space)
    assert ("attribute", "HELPERS.calls") in written(in_a_thread, set())
    assert written(space["made"], set())
    assert threading.getprofile() is None


def test_a_profile_of_the_users_goes_on() -> None:
    profile = cProfile.Profile()
    with profile:
        assert written(attribute, set())
        reads()
    assert any(one.code.co_name == "reads" for one in profile.getstats() if not isinstance(one.code, str))


def test_a_thread_that_goes_on_after_the_block_is_no_longer_looked_at() -> None:
    goes_on, seen = threading.Event(), list[Any]()

    def works_on() -> None:
        goes_on.wait(10.0)
        seen.append(sys.getprofile())

    thread = threading.Thread(target=works_on)
    with collector_paused(), Writes(ObjectsBefore()):
        thread.start()
    goes_on.set()
    thread.join(10.0)
    assert seen == [None]
