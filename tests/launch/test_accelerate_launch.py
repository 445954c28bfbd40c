"""Real launches: `accelerate launch` and `vram-guard launch`, one process and two (gloo), guarded and not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
import two_ranks  # noqa: E402
from accelerate_cases import (  # noqa: E402
    EDITED,
    ONE,
    TRAINER,
    TRAINER_LIBRARIES,
    TRAINING,
    TWO,
    difference,
    launch,
)
from json_answers import held_against  # noqa: E402

from vram_guard.codec import from_json, to_json  # noqa: E402
from vram_guard.techniques import Body, Recipe, Slices  # noqa: E402
from vram_guard_accelerate.apply.applying import PlanInstaller  # noqa: E402
from vram_guard_accelerate.cli import launch as command  # noqa: E402
from vram_guard_accelerate.launch_plan import VARIABLE, LaunchPlan  # noqa: E402
from vram_guard_accelerate.planning.prediction import Prediction, predict  # noqa: E402

LEAVES_GROUP = cases.HERE / "accelerate_scripts" / "leaves_group.py"
LAUNCH = (sys.executable, "-m", "vram_guard.cli", "launch")
LOOPS = ("plain", "clipping", "accumulate", "modulo", "adversarial", "diffusion")
SLICED = LaunchPlan(recipe=Recipe(slices=Slices(Body("", ("0",)), 3, 1)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run_several(out: Path, cache: Path, processes: tuple[str, ...], *own: object, **more: str) -> dict[str, Any]:
    """All loops in one launch; what they came to."""
    out.mkdir()
    more["ACCELERATE_USE_CPU"] = "true"
    done = launch(*processes, *own, TRAINING, "several", "--out", out, cache=cache, guarded=False, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: torch.load(out / f"{name}.pt") for name in LOOPS}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """As written, and under a plan with slices: 16 samples as 6, 6 and 4, or a last batch of 8 as 3, 3 and 2."""
    folder = tmp_path_factory.mktemp("one")
    guarded = ("-m", "vram_guard_accelerate")
    as_written = run_several(folder / "written", cache, ONE)
    return as_written, run_several(folder / "sliced", cache, ONE, *guarded, **{VARIABLE: to_json(SLICED)}), 1


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """The same in two processes."""
    folder = tmp_path_factory.mktemp("two")
    guarded = ("-m", "vram_guard_accelerate")
    as_written = run_several(folder / "written", cache, TWO)
    return as_written, run_several(folder / "sliced", cache, TWO, *guarded, **{VARIABLE: to_json(SLICED)}), 2


@pytest.fixture(params=["one_process", "two_processes"])
def both(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", LOOPS)
def test_slices_change_neither_weights_nor_rates_nor_counters(both: Any, name: str) -> None:
    as_written, sliced, processes = both[0][name], both[1][name], both[2]
    assert as_written["processes"] == sliced["processes"] == processes
    assert difference(as_written, sliced) < 2e-6
    for exact in ("rates", "sizes", "length", "steps"):
        assert as_written.get(exact) == sliced.get(exact), exact
    for close in ("losses", "norms"):
        assert sliced.get(close, []) == pytest.approx(as_written.get(close, []), rel=1e-5)


def test_slices_really_ran(both: Any) -> None:
    """Sums in another order: were it bit-identical, nothing would have been sliced."""
    assert any(difference(both[0][name], both[1][name]) > 0 for name in LOOPS)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """`vram-guard launch`, from the command line to the end of the script."""
    out = tmp_path_factory.mktemp("launched") / "plain.pt"
    options = (*ONE, "--budget", "45MiB", "--margin", "0", "--allow", "slices")
    return launch(*options, TRAINING, "plain", "--out", out, cache=cache), out, options


def test_the_plan_is_shown_and_then_followed(launched: Any) -> None:
    done, out, _ = launched
    assert done.returncode == 0, done.stderr
    assert "slices of the batch" in " ".join(done.stderr.split())
    assert "\nWhy" not in done.stderr, "that is in the whole report"
    assert Path(done.stderr.partition("Full report (-v prints it here): ")[2].partition("\n")[0]).is_file()
    assert "step 0 2." in done.stdout  # the script's own prints, and nothing else there
    assert "slices" not in done.stdout
    assert torch.load(out)["sizes"] == [16, 16, 8, 16, 16, 8]


@pytest.fixture(scope="module")
def predicted(launched: Any, cache: Path) -> Prediction:
    """The answer of its dry run."""
    from vram_guard.cli import main

    _, out, options = launched
    found: list[Prediction] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VRAM_GUARD_CACHE", str(cache))
        patched.setattr(command, "predict", lambda request: found.append(predict(request)) or found[-1])
        assert main(["launch", *options, "--dry-run", str(TRAINING), "plain", "--out", str(out)]) == 0
    return found[0]


@pytest.fixture
def answered(predicted: Prediction, monkeypatch: Any) -> None:
    """Dry runs of one test have that answer."""
    monkeypatch.setattr(command, "predict", lambda _request: predicted)


@pytest.mark.usefixtures("answered")
def test_the_plan_for_programs(launched: Any, capsys: Any) -> None:
    from vram_guard.cli import main

    _, out, options = launched
    assert main(["launch", *options, "--dry-run", "--json", str(TRAINING), "plain", "--out", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert held_against("launch", answer) == []
    assert answer["recipe"]["slices"]["count"] > 1
    assert answer["estimate"]["releases"]["accelerate"] == version("accelerate")


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(("typed", "started"), [("n\n", False), ("", False), ("\n", True)])
def test_asked_before_launching(launched: Any, monkeypatch: Any, typed: str, started: bool) -> None:
    """What would be started is looked at, not run."""
    from vram_guard.cli import main
    from vram_guard_accelerate.cli import launchers

    _, out, options = launched
    starts: list[list[str]] = []
    monkeypatch.setattr(launchers, "run", lambda options, command, simple: starts.append([*options, *command]) or 7)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.delenv(VARIABLE, raising=False)
    code = main(["launch", *options, "--ask", str(TRAINING), "plain", "--out", str(out)])
    assert code == (7 if started else 0)
    if started:
        assert starts == [[*ONE, "-m", "vram_guard_accelerate", str(TRAINING), "plain", "--out", str(out)]]
        assert from_json(LaunchPlan, os.environ.pop(VARIABLE)).recipe.slices is not None


def test_transformers_trainer_under_the_guard(tmp_path: Path, cache: Path) -> None:
    arguments = (
        *("--output_dir", tmp_path / "out", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true"),
        *("--num_train_epochs", 1, "--per_device_train_batch_size", 16, "--optim", "sgd", "--learning_rate", 0.1),
    )
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    plain = launch(*ONE, TRAINER, *arguments, "--out", one, cache=cache, guarded=False, libraries=TRAINER_LIBRARIES)
    options = ("--budget", "80MiB", "--margin", "0", "--allow", "slices")
    guarded = launch(*ONE, *options, TRAINER, *arguments, "--out", two, cache=cache, libraries=TRAINER_LIBRARIES)
    assert (plain.returncode, guarded.returncode) == (0, 0), guarded.stderr
    as_written, sliced = torch.load(one), torch.load(two)
    assert 0 < difference(as_written, sliced) < 1e-6
    assert as_written["rates"] == sliced["rates"]
    assert as_written["steps"] == sliced["steps"] == 3


def test_a_growing_batch_scales_rates_once_also_over_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    """Three steps, a checkpoint after each, and a run that goes on from the second: its rates are the third's."""
    plan = LaunchPlan(batch_size=8, grown_batch_size=16, learning_rate_factor=2.0)
    more = {VARIABLE: to_json(plan)}
    first, second, folder = tmp_path / "first.pt", tmp_path / "second.pt", tmp_path / "checkpoints"
    own = (*ONE, "-m", "vram_guard_accelerate", TRAINING, "accumulate", "--batch_size", 8, "--samples", 200)
    done = launch(*own, "--out", first, "--checkpoints", folder, cache=cache, guarded=False, **more)
    assert done.returncode == 0, done.stderr
    rates = torch.load(first)["rates"]
    assert rates == pytest.approx([2 * 0.1 / (1 + step) for step in (1, 2, 3)])
    resumed = launch(
        *own, "--out", second, "--resume", folder / "step_2", "--steps", 1, cache=cache, guarded=False, **more
    )
    assert resumed.returncode == 0, resumed.stderr
    assert torch.load(second)["rates"] == pytest.approx(rates[2:])


@pytest.fixture
def doubled_rates(monkeypatch: Any) -> Any:
    """LaunchPlan to double learning rates, in this process, for one test."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    for name in ("prepare", "prepare_model", "save_state", "load_state"):
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))
    for kind in (LRScheduler, ReduceLROnPlateau):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    PlanInstaller(LaunchPlan(learning_rate_factor=2.0)).install()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("doubled_rates")
def test_a_schedule_that_is_not_prepared_is_scaled_too() -> None:
    """Transformers' Trainer hands its optimizer to ``prepare``, and keeps its schedule."""
    from accelerate import Accelerator

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, prepared = Accelerator(cpu=True).prepare(model, optimizer)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 2)).sum().backward()
        prepared.step()
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.1, 0.2 / 3])


@pytest.mark.usefixtures("doubled_rates")
def test_the_newest_checkpoint_is_scaled_once(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    accelerator.prepare(optimizer)
    accelerator.save_state()
    accelerator.load_state()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def edited(out: Path, cache: Path, *own: str, **more: str) -> str:
    """The edited script, run as it is; what it said."""
    done = subprocess.run(
        [sys.executable, str(EDITED), "--out", str(out), *own],
        env=cases.environment(VRAM_GUARD_CACHE=str(cache), **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_edited_script_is_planned_for_in_its_own_process(tmp_path: Path, cache: Path) -> None:
    results, heard = [], []
    for budget, more in (("1GiB", {}), ("40MiB", {}), ("40MiB", {"VRAM_GUARD_DISABLE": "1"})):
        out = tmp_path / f"{budget}.pt"
        heard.append(edited(out, cache, "--budget", budget, **more))
        results.append(torch.load(out))
        assert results[-1]["restored"]
        assert Path(f"{out}.0").read_text() == "a step\n" * 3  # none of a copy's
    assert "slices of the batch" in results[1]["text"]
    assert 0 < difference(*results[:2]) < 1e-6
    assert results[2]["text"] == ""  # switched off
    assert difference(results[0], results[2]) == 0
    # The script sets no logging up: what is changed is said all the same.
    assert [said.count("Does not fit as written") for said in heard] == [0, 1, 0]
    assert [said.count("Full report") for said in heard] == [1, 1, 0]


@pytest.fixture(scope="module")
def switched_off(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    out = tmp_path_factory.mktemp("off") / "off.pt"
    edited(out, cache, "--budget", "40MiB", VRAM_GUARD_DISABLE="1")
    return torch.load(out)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("training, dies", "was killed by signal 11"),
        ("prepared, hangs", "did not answer for 2 s"),
    ],
)
def test_an_edited_script_whose_copy_is_lost_trains_as_it_is_written(
    lost: str, said: str, tmp_path: Path, cache: Path, switched_off: Any
) -> None:
    out = tmp_path / "out.pt"
    heard = edited(out, cache, "--budget", "40MiB", "--lost", lost)
    assert heard.count("which is left unchanged") == 1
    assert said in heard
    assert re.search(r"; it was at \S+\.py:\d+, in (lost|wait)$", heard, re.MULTILINE)
    assert re.search(r'^  File "\S*edited\.py", line \d+ in main$', heard, re.MULTILINE)
    result = torch.load(out)
    assert (result["text"], result["fits"], result["restored"]) == ("", None, True)
    assert difference(result, switched_off) == 0
    assert Path(f"{out}.0").read_text() == "a step\n" * 3


def test_two_processes_whose_copy_is_lost_both_train_as_it_is_written(tmp_path: Path, cache: Path) -> None:
    results = []
    for name, own, more in (("off", (), {"VRAM_GUARD_DISABLE": "1"}), ("lost", ("--lost", "prepared, dies"), {})):
        out = tmp_path / name
        command = (*TWO, EDITED, "--out", out, "--budget", "40MiB", *own)
        done = launch(*command, cache=cache, guarded=False, ACCELERATE_USE_CPU="true", **more)
        assert done.returncode == 0, done.stderr
        results.append(torch.load(out))
    assert done.stderr.count("which is left unchanged") == 1
    assert difference(*results) == 0
    assert [Path(f"{out}.{rank}").read_text() for rank in (0, 1)] == ["a step\n" * 2] * 2


# --- how it ends ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting_script(cache: Path, interrupts: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launch whose script waits, and the script's process; SIGINT is as given, however these tests were started."""

    def signals_of_a_terminal() -> None:
        signal.signal(signal.SIGINT, interrupts)
        for number in (signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    out = cache / "pid"
    out.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*LAUNCH, *ONE, "--budget", "1GiB", str(TRAINING), "waits", "--out", str(out)],
        env=cases.environment(VRAM_GUARD_CACHE=str(cache)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=signals_of_a_terminal,  # noqa: PLW1509 - nothing else runs in the child
    )
    try:
        deadline = time.monotonic() + 250
        while not out.exists() or not out.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process, int(out.read_text())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGINT, "launcher"), (signal.SIGKILL, "script")], ids=["Ctrl-C", "killed script"]
)
def test_signals_end_it_cleanly(number: int, whom: str, cache: Path) -> None:
    with waiting_script(cache, signal.SIG_DFL) as (process, script):
        for _attempt in range(3):  # Python drops a Ctrl-C that arrives in a destructor: one presses again
            os.kill(process.pid if whom == "launcher" else script, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
                break
        assert process.wait(20) == -number
        with pytest.raises(ProcessLookupError):
            os.kill(script, 0)


def test_a_launch_that_was_started_with_interrupts_ignored_ignores_them(cache: Path) -> None:
    """As a shell starts jobs in the background: its Ctrl-C is not meant for them."""
    with waiting_script(cache, signal.SIG_IGN) as (process, script):
        for whom in (process.pid, script):
            os.kill(whom, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        os.kill(script, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(script, 0)


# --- process groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "code"), [((), 0), (("--raises",), 3)], ids=["ends", "raises"])
def test_process_groups_that_a_script_leaves_alive_are_ended_after_its_own_exit_handlers(
    tmp_path: Path, own: tuple[str, ...], code: int
) -> None:
    """Each with operations that still run: without an end, threads of gloo abort about one process in six."""
    for _run in range(3):
        plan = {VARIABLE: to_json(LaunchPlan()), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        started = ("-m", "vram_guard_accelerate", LEAVES_GROUP, *own)
        for found, said in two_ranks.ended(*started, libraries=cases.LIBRARIES, cwd=tmp_path, **plan):
            assert found == code, said
            assert "terminate called" not in said
            ends = [line for line in said.splitlines() if line.startswith("the ")]  # triton may say more at its own end
            assert ends == ["the script's own exit handler: True", "the group is ended"]


# --- what is typed --------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    from vram_guard.cli import main

    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("{: nothing")
    for arguments, says in (
        ((), "training_script"),
        (("nowhere.py",), f"there is no script nowhere.py, seen from {Path.cwd()}"),
        ((str(tmp_path),), "is a folder"),
        (("-m", "no.such.module"), "there is no module"),
        (("--bugdet", "1GiB", str(TRAINING)), "--bugdet"),
        (("--budget=-1GiB", str(TRAINING)), "-1GiB"),
        (("--budget", "1GiB", "--allow", "chekpoint", str(TRAINING)), "did you mean 'checkpoint'"),
        (("--budget", "1GiB", "--no_python", str(TRAINING)), "not Python"),
        (("--budget", "1GiB", "--config_file", str(broken), str(TRAINING)), "config file"),
        (("--budget", "1GiB", "--config_file", str(tmp_path / "no.yaml"), str(TRAINING)), "does not exist"),
        (("--budget", "1GiB", "--cpu", "--multi_gpu", str(TRAINING)), "You can only use one of"),
    ):
        try:
            code = main(["launch", *arguments])
        except SystemExit as ended:
            code = ended.code
        assert code == 2, arguments
        assert says in capsys.readouterr().err, arguments
    assert not (tmp_path / "cache").exists()


def test_sharded_launches_are_refused_by_name(capsys: Any) -> None:
    from vram_guard.cli import main

    assert main(["launch", "--budget", "1GiB", "--use_megatron_lm", *QUIET_FSDP, str(TRAINING)]) == 3
    assert "--use_megatron_lm: Megatron-LM builds the model itself" in capsys.readouterr().err


QUIET_FSDP = ("--num_processes", "2", *cases.QUIET)


@pytest.mark.usefixtures("answered")
def test_on_several_machines_every_process_is_handed_the_plan(monkeypatch: Any) -> None:
    from vram_guard.cli import main
    from vram_guard_accelerate.cli import launchers

    starts: list[list[str]] = []
    monkeypatch.setattr(launchers, "run", lambda options, command, simple: starts.append([*options, *command]) or 7)
    monkeypatch.setenv(VARIABLE, "")
    several = ("--multi_gpu", "--num_machines", "2", "--num_processes", "16", "--machine_rank", "0")
    where = ("--main_process_ip", "127.0.0.1", "--main_process_port", "29511", *cases.QUIET[2:])
    assert main(["launch", *several, *where, "--budget", "1GiB", str(TRAINING), "plain"]) == 7
    assert starts == [[*several, *where, "-m", "vram_guard_accelerate", str(TRAINING), "plain"]]
    assert from_json(LaunchPlan, os.environ[VARIABLE]).recipe.slices is not None


@pytest.mark.parametrize(("other", "code"), [(LaunchPlan(), 0), (SLICED, 3)], ids=["the same", "another"])
def test_machines_that_plan_differently_do_not_train(tmp_path: Path, other: LaunchPlan, code: int) -> None:
    """Two processes as torchrun starts them, each on a machine of its own."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('trains on', os.environ['RANK'])\n")
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ended = []
    for rank, plan in enumerate((LaunchPlan(), other)):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", VARIABLE: to_json(plan)}
        ended.append(
            subprocess.run(
                [sys.executable, "-m", "vram_guard_accelerate", str(script)],
                env=cases.environment(**shared, **where, **own),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        )
    assert [one.returncode for one in ended] == [0, code], ended[1].stderr
    assert ended[0].stdout == "trains on 0\n"
    assert ended[1].stdout == ("" if code else "trains on 1\n")


def test_a_process_without_a_plan_names_the_launcher() -> None:
    own = [sys.executable, "-m", "vram_guard_accelerate", str(TRAINING)]
    done = subprocess.run(own, env=cases.environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "vram-guard launch" in done.stderr


def test_help_names_every_option_of_ours(capsys: Any) -> None:
    from vram_guard.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    for name in ("--budget", "--advanced", "--allow", "--dry-run", "--fsdp_version"):
        assert f"  {name}" in shown


def test_arguments_are_sorted_by_accelerates_own_parser() -> None:
    from vram_guard_accelerate.cli.arguments import parsed

    given = parsed(
        [
            *("--num_processes", "2", "--budget=24GiB", "--mixed_precision", "bf16", "--grow", str(TRAINING)),
            *("plain", "--budget", "the script's own", "--num_processes", "9"),
        ]
    )
    assert given.accelerate == ("--num_processes", "2", "--mixed_precision", "bf16")
    assert given.arguments == ("plain", "--budget", "the script's own", "--num_processes", "9")
    assert given.settings.budget == "24GiB"
    assert given.settings.grow


def test_without_a_script_it_asks_for_one_and_not_for_its_arguments(capsys: Any) -> None:
    from vram_guard_accelerate.cli.arguments import parsed

    with pytest.raises(SystemExit) as ended:
        parsed(["--budget", "1GiB"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith("required: training_script (vram-guard launch --help)")
    assert parsed(["--budget", "1GiB", str(TRAINING)]).arguments == ()


def test_a_config_file_and_the_environment_decide_what_accelerate_does(tmp_path: Path, monkeypatch: Any) -> None:
    from vram_guard_accelerate.cli.arguments import parsed
    from vram_guard_accelerate.cli.target import target_of

    config = tmp_path / "config.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\n"
                      "num_machines: 1\nmixed_precision: bf16\nuse_cpu: false\ngpu_ids: all\nmachine_rank: 0\n"
                      "main_training_function: main\n")  # fmt: skip
    target = target_of(parsed(["--budget", "1GiB", "--config_file", str(config), str(TRAINING), "plain"]))
    assert (target.ranks, target.simple) == (4, False)
    assert target.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    one = target_of(parsed(["--budget", "1GiB", *ONE, str(TRAINING), "plain"]))
    assert (one.ranks, one.simple) == (1, True)
