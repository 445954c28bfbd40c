"""Calls that a script makes below the line at which it stands."""

from pathlib import Path

from vram_guard.capture.later_calls import later_calls


class Trainer:
    def __init__(self):
        self.seen = frozenset()

    def fit(self):
        self.seen = later_calls("test")

    def test(self): ...


def inner(trainer):
    trainer.fit()
    trainer.validate = None


def test_calls_below_are_known():
    trainer = Trainer()
    trainer.fit()
    assert trainer.seen >= {"test"}
    trainer.test()


def test_those_of_functions_around_are_too():
    trainer = Trainer()
    for _once in range(1):
        with Path(__file__).open(encoding="utf-8"):
            inner(trainer)
        assert trainer.seen >= {"test"}
    print(trainer.test())


def test_what_may_not_come_is_left_out():
    trainer = Trainer()
    if trainer.seen:
        trainer.test()
    trainer.fit()

    def unused():
        trainer.test()

    if not trainer.seen:
        trainer.test()
    assert "test" not in trainer.seen
    assert unused is not None


def test_what_comes_before_is_left_out():
    trainer = Trainer()
    trainer.test()
    trainer.fit()
    assert "test" not in trainer.seen


def test_code_without_a_file_is_unknown():
    namespace = {"trainer": Trainer()}
    exec("trainer.fit()\ntrainer.test()", namespace)
    assert "test" not in namespace["trainer"].seen
