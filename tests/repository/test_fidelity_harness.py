"""The harness of the fidelity tests can tell a training that differs in silence from one that does not."""

from __future__ import annotations

import torch
from each import each
from fidelity.harness import FIT, MICRO, REPORT, Case, Outcome, Verdict, differences, fault, judge, notes, refusal

CASE = Case("a", object, says=r"\bqueue\b")
PLAIN = Outcome({"weights": torch.tensor([1.0, 2.0]), "counts": {"steps": 3}})
OTHER = {"weights": torch.tensor([1.0, 2.1]), "counts": {"steps": 3}}
CONTROL = ["the losses of 2 micro-batches are weighted", "usual words about the queue"]


def verdict(mode=MICRO, record=OTHER, words=(), case=CASE, applied=True, crash=""):
    return judge(case, mode, PLAIN, Outcome(record, list(words), applied, crash=crash), CONTROL).verdict


def test_equal_is_equal():
    assert verdict(record=PLAIN.record) is Verdict.EQUAL
    assert verdict(REPORT, PLAIN.record, applied=False) is Verdict.EQUAL


def test_a_difference_without_words_is_silent():
    assert verdict() is Verdict.SILENT
    assert verdict(record={**PLAIN.record, "counts": {"steps": 4}}) is Verdict.SILENT
    assert verdict(record={"weights": PLAIN.record["weights"]}) is Verdict.SILENT
    assert verdict(record=None, crash="RuntimeError: queue") is Verdict.SILENT


def test_a_rounding_error_is_allowed_where_something_was_changed():
    rounded = {**PLAIN.record, "weights": torch.tensor([1.0, 2.0]) * (1 + 3e-6)}
    assert verdict(record=rounded) is Verdict.EQUAL
    assert verdict(record=rounded, applied=False) is Verdict.SILENT
    assert verdict(FIT, rounded, applied=False) is Verdict.SILENT


@each(
    ("words", "expected"),
    [
        ("the queue differs by 3%", Verdict.SAID),
        ("usual words about the queue", Verdict.SILENT),
        ("the queue: 4 samples were run, and nothing that is learned differs", Verdict.SILENT),
        ("the queue is not proven by anything", Verdict.SAID),
        ("something else (models/queue.py:3)", Verdict.SILENT),
    ],
)
def test_only_words_that_name_the_cause_count(words, expected):
    assert verdict(words=[words]) is expected


def test_what_was_asked_for_is_not_dropped_in_silence():
    assert verdict(record=PLAIN.record, applied=False) is Verdict.SILENT
    refused = ["smaller micro-batches are not possible here: the loss is no mean"]
    assert verdict(record=PLAIN.record, applied=False, words=refused) is Verdict.SAID
    exact = Case("b", object, exact=True)
    judged = judge(exact, MICRO, PLAIN, Outcome(PLAIN.record, refused), CONTROL)
    assert "were not run" in fault(exact, MICRO, judged)


def test_differences_are_found_wherever_they_are():
    one = {"a": [torch.ones(2), (1.5, "x")], "b": {1}, "c": torch.tensor(float("nan"))}
    assert list(differences(one, one, 0.0)) == []
    for other in ({**one, "b": {2}}, {**one, "a": [torch.ones(2)]}, {**one, "a": [torch.ones(3), (1.5, "x")]},
                  {**one, "a": [torch.ones(2), (1.6, "x")]}, {**one, "c": torch.tensor(1.0)}):  # fmt: skip
        assert list(differences(one, other, 1e-5))
        assert list(differences(one, other, 0.0))


def test_notes_are_the_sentences_below_the_tables():
    printed = "Peak\n  batch size  8\n\nWhy\n  • One reason\n    that goes on.\n  - A note\nvram_guard: applied.\n"
    assert notes(printed) == ["One reason that goes on.", "A note", "vram_guard: applied."]


def test_a_refusal_is_judged_sentence_by_sentence():
    error = ValueError(
        "does not fit.\nIt needs more.\n\nWhy:\n  - the queue\n    joins samples\n\nNotes:\n  - no symbolic kernel"
    )
    said = refusal(error)
    assert said == [
        "ValueError: does not fit. It needs more.",
        "Why:",
        "the queue joins samples",
        "Notes:",
        "no symbolic kernel",
    ]
    assert verdict(record=None, words=said, applied=False) is Verdict.SAID
    assert verdict(record=None, words=[said[0], said[-1]], applied=False) is Verdict.SILENT
