"""Configs from strangers: whatever is in the file, it is read without harm or refused in bounded time and memory."""

from __future__ import annotations

import os
import time

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


def test_references_are_replaced_and_nothing_is_run(tmp_path):
    """As OmegaConf resolves them, where it is installed; what runs code there stays text."""
    text = (
        "size: 8\nroot: runs\nname: ${root}/b${size}\ndata: {batch_size: '${size}', half: '${.batch_size}'}\n"
        "model: {inner: {width: '${..wide}', deep: '${data.half}'}, wide: 16}\nrates: [0.5, 0.1]\nlr: ${rates[1]}\n"
    )
    resolver = "home: ${oc.env:HOME}\nsection: ${data}\n"
    found = load_config(written(tmp_path, text + resolver + "none: ${missing.one}\nescaped: '\\${size}'\n"))
    assert found["name"] == "runs/b8"
    assert found["data"] == {"batch_size": 8, "half": 8}
    assert found["model"] == {"inner": {"width": 16, "deep": 8}, "wide": 16}
    assert found["lr"] == 0.1
    assert found["home"] == "${oc.env:HOME}"
    assert found["section"] == "${data}"
    assert found["none"] == "${missing.one}"
    assert found["escaped"] == "\\${size}"
    omegaconf = pytest.importorskip("omegaconf")
    assert load_config(written(tmp_path, text)) == omegaconf.OmegaConf.to_container(
        omegaconf.OmegaConf.create(text), resolve=True
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: ${b}\nb: x${a}\n", "the interpolation of a contains itself"),
        ("a0: xxxxxxxxxxxxxxxx\n" + "".join(f"a{n + 1}: ${{a{n}}}${{a{n}}}\n" for n in range(60)), "is too long"),
        ("".join(f"a{n}: ${{a{n + 1}}}\n" for n in range(5000)) + "a5000: 1\n", "nested too deeply"),
    ],
)
def test_references_without_an_end_are_refused(tmp_path, text, said):
    with pytest.raises(InvalidInputError, match=said):
        load_config(written(tmp_path, text))


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


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    began = time.process_time()
    with pytest.raises(InvalidInputError):
        load_config(written(tmp_path, "\n".join(lines)))
    assert time.process_time() - began < 1
