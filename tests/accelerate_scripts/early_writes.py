"""Scripts that write, move and train before ``prepare``, or without it; run with the name of one and a folder."""

# ruff: noqa: LOG015, PTH101, PTH103, PTH104, PTH105, PTH123, PTH211 - in all the ways in which people write

import json
import logging
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])


def train(each_step=lambda: None):
    accelerator = Accelerator()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
    )
    for (x,) in loader:
        each_step()
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()


def writes():
    """In many ways, and reads it back."""
    run = folder / "runs" / "first"
    os.makedirs(run)  # fails where it is there
    (run / "config.json").write_text(json.dumps({"lr": 1}))
    assert json.loads((run / "config.json").read_text()) == {"lr": 1}
    with open(folder / "log.txt", "a") as log:
        log.write("one more line\n")
    assert (folder / "log.txt").read_text() == "kept\none more line\n"
    (folder / "settings.json").write_text("{}")
    assert (folder / "settings.json").read_text() == "{}"
    logging.basicConfig(filename=folder / "train.log", filemode="w", level=logging.INFO)
    logging.info("begins")
    torch.save({"step": 0}, folder / "checkpoint.pt")
    assert torch.load(run / "new.pt") if (run / "new.pt").exists() else True
    torch.save({"step": 0}, run / "new.pt")
    assert torch.load(run / "new.pt") == {"step": 0}
    handle = os.open(folder / "raw.bin", os.O_WRONLY | os.O_TRUNC)
    os.write(handle, b"new")
    os.close(handle)
    database = sqlite3.connect(folder / "runs.sqlite")
    database.execute("create table runs (name text)")
    database.execute("insert into runs values ('first')")
    database.commit()
    database.close()
    known = sqlite3.connect(folder / "known.sqlite")
    known.execute("insert into runs values ('another')")
    known.commit()
    assert known.execute("select count(*) from runs").fetchone() == (2,)
    known.close()
    shutil.copy(run / "config.json", run / "copy.json")
    os.rename(run / "copy.json", run / "renamed.json")
    (run / "gone.txt").write_text("soon gone")
    (run / "gone.txt").unlink()
    (run / "fresh.json").write_text('{"fresh": true}')
    os.replace(run / "fresh.json", folder / "settings.json")
    assert json.loads((folder / "settings.json").read_text()) == {"fresh": True}
    assert not (run / "fresh.json").exists()
    (run / "fresh.json").write_text('{"fresher": true}')
    (run / "fresh.json").rename(folder / "settings.json")
    assert json.loads((folder / "settings.json").read_text()) == {"fresher": True}
    os.symlink(run, folder / "latest")
    with tempfile.NamedTemporaryFile(dir=folder) as temporary:
        temporary.write(b"x")
    shutil.copytree(run, folder / "runs" / "second")
    shutil.rmtree(folder / "runs" / "second")
    shutil.copytree(run, folder / "runs" / "third")
    os.rename(folder / "runs" / "third", folder / "third")
    (folder / "third" / "config.json").unlink()
    shutil.move(run / "renamed.json", folder / "old")
    describes_and_links(run)
    makes_a_run_as_hydra_does()
    writes_by_libraries(run)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    if sys.argv[3:] == ["programs"]:
        starts_programs()
    train(goes_on)


def goes_on():
    """In every step: what was written before it is read back, and what is written is thrown away."""
    assert json.loads((folder / "settings.json").read_text()) == {"fresher": True}
    assert torch.load(folder / "checkpoint.pt") == {"step": 0}
    (folder / "settings.json").write_text("{}")
    writes_by_libraries(folder / "never")


def writes_by_libraries(run):
    """In C++: over files that are there, beside them, and into a folder."""
    import cv2
    import h5py
    import pyarrow as pa
    from pyarrow import csv, feather, parquet
    from pyarrow import dataset as arrow_dataset

    table, first = pa.table({"loss": [1.0, 2.0, 3.0]}), run.name == "first"
    for path in (folder / "table.parquet", run / "new.parquet"):
        parquet.write_table(table, path)
        if first:
            assert parquet.read_table(str(path)).num_rows == 3
    feather.write_feather(table, str(run / "new.feather"))
    csv.write_csv(table, str(run / "new.csv"))
    with pa.OSFile(str(run / "new.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as written:
        written.write_table(table)
    arrow_dataset.write_dataset(table, run / "parts", format="parquet", existing_data_behavior="overwrite_or_ignore")
    for path in (folder / "table.h5", run / "new.h5"):
        with h5py.File(path, "w") as file:
            file["loss"] = np.zeros(3)
    for path in (folder / "picture.png", run / "new.png"):
        assert cv2.imwrite(str(path), np.full((8, 8, 3), 7, np.uint8))
    if first:
        assert cv2.imread(str(folder / "picture.png"))[0, 0, 0] == 7


def writes_into_a_folder():
    """That has files of the user's: which of them a library would replace is not known."""
    import pyarrow as pa
    from pyarrow import dataset

    dataset.write_dataset(pa.table({"loss": [1.0]}), folder / "old", format="parquet")
    train()


def makes_a_run_as_hydra_does():
    """A folder of the day with one of the time in it, where the script goes on; and something at home."""
    here, made = Path.cwd(), folder / "outputs" / "day" / "time"
    made.mkdir(parents=True)
    (made / ".hydra").mkdir()
    os.chdir(made)
    Path(".hydra", "config.yaml").write_text("lr: 1")
    Path("train.log").write_text("begins")
    torch.jit.script(nn.Linear(2, 2)).save("scripted.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(folder / "raw.bin"))
    os.mkfifo("pipe")
    torch.from_file(str(folder / "mapped.bin"), shared=True, size=8, dtype=torch.uint8).fill_(9)
    os.chdir(here)
    (Path.home() / ".runs" / "first").mkdir(parents=True)
    (Path.home() / ".netrc").write_text("others")


def starts_programs():
    """They write, move and remove, and so does a new process of Python."""
    subprocess.run(["touch", folder / "touched.txt"], check=False)
    subprocess.run(f"echo more >> {folder / 'log.txt'}; cat {folder / 'log.txt'}", shell=True, check=True)
    os.system(f"rm -r {folder / 'old'}; mkdir -p {folder / 'made_by_a_shell'}")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(os.path.basename, ("a/b",)) == "b"
        try:
            pool.apply(os.mkdir, (folder / "made_by_a_pool",))
        except PermissionError:
            return
        raise AssertionError


def describes_and_links(run):
    (folder / "settings.json").touch()
    os.utime(folder / "raw.bin", (1, 1))
    os.chmod(folder / "raw.bin", 0o700)
    os.truncate(folder / "raw.bin", 1)
    assert (folder / "raw.bin").read_bytes() == b"n"
    os.link(folder / "linked.txt", run / "first_name.txt")
    os.rename(run / "first_name.txt", run / "hard.txt")
    os.symlink(folder / "linked.txt", run / "soft.txt")
    os.symlink(folder / "made_through_a_link.txt", run / "new.txt")
    for name in ("hard.txt", "soft.txt", "new.txt"):
        (run / name).write_text("through a link")
        assert (run / name).read_text() == "through a link"
    save_file({"weight": torch.zeros(2)}, folder / "weights.safetensors")
    assert load_file(folder / "weights.safetensors")["weight"].shape == (2,)
    saves_tokenizers(run)
    below = os.open(folder, os.O_RDONLY)
    os.close(os.open("raw.bin", os.O_WRONLY | os.O_TRUNC, dir_fd=below))
    os.close(os.open("below.txt", os.O_WRONLY | os.O_CREAT, dir_fd=below))
    mapped = np.memmap(folder / "mapped.bin", dtype="uint8", mode="r+")
    mapped[:] = 7
    mapped.flush()
    os.close(below)


def saves_tokenizers(run):
    """In Rust: over a file that is there, beside it, and by what Transformers calls; the model alone too."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    for path in (folder / "tokenizer.json", run / "tokenizer.json"):
        words.save(str(path))
        assert Tokenizer.from_file(str(path)).get_vocab_size() == 2
    words.save(str(run / "flat.json"), pretty=False)
    assert len((run / "flat.json").read_text().splitlines()) == 1
    written = words.model.save(str(folder))
    assert written == [str(folder / "vocab.json")]
    assert json.loads((folder / "vocab.json").read_text()) == {"[UNK]": 0, "word": 1}


def removes():
    shutil.rmtree(folder / "old")
    train()


def removes_where_it_has_moved_something():
    (folder / "fresh.json").write_text("{}")
    shutil.move(folder / "fresh.json", folder / "old")
    (folder / "old" / "weights.bin").unlink()
    train()


def writes_where_it_has_moved_something():
    """The file is written in a copy."""
    (folder / "fresh.json").write_text("{}")
    shutil.move(folder / "fresh.json", folder / "old")
    (folder / "old" / "weights.bin").write_bytes(b"others")
    os.rename(folder / "settings.json", folder / "old" / "fresh.json")


def removes_below_an_open_folder():
    """Named as a file of the current folder is that the script has made."""
    os.chdir(folder / "old")
    Path("settings.json").write_text("{}")
    os.remove("settings.json", dir_fd=os.open(folder, os.O_RDONLY))
    train()


def moves():
    os.replace(folder / "settings.json", folder / "settings.old.json")
    train()


def overwrites():
    os.symlink(folder / "raw.bin", folder / "fresh")
    os.replace(folder / "fresh", folder / "settings.json")
    train()


def by_itself():
    """As nanoGPT does: no Accelerator at all, and the best checkpoint is written again and again."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1000):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), folder / "checkpoint.pt")


def warms_up():
    """An Accelerator, and a real step before prepare."""
    Accelerator()
    nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    train()


if __name__ == "__main__":
    globals()[name]()
