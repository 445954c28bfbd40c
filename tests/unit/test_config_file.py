"""Configs from strangers: whatever is in the file, it is read without harm or refused in bounded time and memory."""

from __future__ import annotations

import os

import pytest

from vram_guard.config_file import leaves, load_config
from vram_guard.errors import InvalidInputError
from vram_guard.limits import LARGEST_CONFIG


def written(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_config_with_anchors_and_merge_keys(tmp_path):
    path = written(tmp_path, "\ufeffbase: &base\n  a: 1\n  b: [1, 2]\nmodel:\n  <<: *base\n  b: 3\n1: one\n")
    config = load_config(path)
    assert config == {"base": {"a": 1, "b": [1, 2]}, "model": {"a": 1, "b": 3}, "1": "one"}
    assert dict(leaves(config)) == {"base.a": 1, "base.b": [1, 2], "model.a": 1, "model.b": 3, "1": "one"}


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!python/object/new:os.system", "!own"]
)
def test_tags_are_refused_and_nothing_is_run(tmp_path, tag):
    proof = tmp_path / "proof"
    with pytest.raises(InvalidInputError, match="line 1: could not determine a constructor"):
        load_config(written(tmp_path, f"x: {tag} ['touch {proof}']\n"))
    assert not proof.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "contains itself"),
        ("model:\n  width: 1\n  depth: 2\n  width: 3\n", "line 4: duplicate key width"),
        ("a: [1, 2", "line"),
        ("- 1\n- 2\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("a: 1\n---\nb: 2\n", "line"),
        ("a: 2020-13-45", "month"),
        ("[" * 5000, "nested too deeply"),
        (b"a: \xff\xfe", "not UTF-8"),
        ("? [1, 2]\n: 3\n", "unhashable"),
        ("a: \x00", "config.yaml"),
        ("a:\n\tb: 1\n", "line 2: a tab, .* indent by spaces"),
    ],
)
def test_what_is_no_config_is_named(tmp_path, text, said):
    with pytest.raises(InvalidInputError, match=said) as caught:
        load_config(written(tmp_path, text))
    assert str(caught.value).count("config.yaml") == 1


def test_a_config_of_more_than_1_mb_is_not_even_read(tmp_path):
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no disk
    with pytest.raises(InvalidInputError, match="1 MiB"):
        load_config(path)
    assert LARGEST_CONFIG == 2**20


def test_references_stay_text(tmp_path):
    found = load_config(written(tmp_path, "size: 8\ndata: {batch_size: '${size}'}\nhome: ${oc.env:HOME}\n"))
    assert found["data"] == {"batch_size": "${size}"}
    assert found["home"] == "${oc.env:HOME}"


def test_a_python_config_is_sent_to_the_command_that_reads_it(tmp_path):
    path = tmp_path / "resnet.py"
    path.write_text("model = dict(type='ResNet')\n")
    with pytest.raises(InvalidInputError, match=r"resnet\.py"):
        load_config(path)


def test_what_is_no_file(tmp_path):
    with pytest.raises(InvalidInputError):
        load_config(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        load_config(tmp_path / "missing.yaml")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInputError):
        load_config(pipe)
    with pytest.raises(InvalidInputError):
        load_config("null\x00byte")


def test_an_alias_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(InvalidInputError):
        load_config(written(tmp_path, "\n".join(lines)))
