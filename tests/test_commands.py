"""The command line: one sentence for a fault, nothing half-written, work that is resumed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from machine_scenes import started, wait_for

from fl_privacy_lib.__main__ import main
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.chapters import experiment as chapter_experiment
from fl_privacy_lib.chapters.counting_privacy.parameters import CountingPrivacy
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.threat_types import grid as threat_types
from fl_privacy_lib.chapters.threat_types import run
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.reproduction import execution, experiment, loading, paths
from fl_privacy_lib.reproduction.paths import ROOT


def command(*arguments, data="", timeout=60, **environment):
    variables = {k: v for k, v in os.environ.items() if k != "FL_PRIVACY_DATA"} | environment
    if data:
        variables["FL_PRIVACY_DATA"] = str(data)
    return subprocess.run(
        [sys.executable, "-m", "fl_privacy_lib", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def one_sentence(done, *words):
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].endswith("."), (
        done.stderr
    )
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture
def untouched():
    """Fail if a refused command leaves a new file in runs/ or _build/stage/."""
    folders = [ROOT / "runs", ROOT / "_build" / "stage"]
    before = {p for f in folders for p in f.rglob("*")}
    yield
    assert {p for f in folders for p in f.rglob("*")} == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("verb", ["run", "record"])
def test_wrong_parameters(verb):
    one_sentence(command(verb, "01", "clip_norm=-1"), "clip_norm", "-1")
    one_sentence(command(verb, "01", "clip_nrom=1"), "clip_nrom", "did you mean clip_norm")
    one_sentence(command(verb, "99"), "99")
    one_sentence(command(verb, "01", "--profile", "fast"), "fast", "quick")
    one_sentence(command(verb, "01", "--profile", "smoke", "clip_norm=-1"), "clip_norm", "-1")
    one_sentence(command(verb, "01", "--fast"), "--fast")


@pytest.mark.usefixtures("untouched")
def test_wrong_parameters_of_the_book():
    one_sentence(command("book", "clip_norm=-1"), "clip_norm")
    one_sentence(command("book", "nose_scale=1"), "nose_scale")


@pytest.mark.usefixtures("untouched")
def test_wrong_data(tmp_path):
    one_sentence(command("run", "01", "dataset=mnits"), "dataset", "mnits", "did you mean mnist")
    one_sentence(command("run", "01", "dataset=cancer"), "cancer", "is not one of auto, mnist")
    one_sentence(command("run", "01", f"dataset=npz:{tmp_path}/none.npz"), "none.npz")
    recorded = command("record", "05", "--only=table_2_100_5", f"dataset=npz:{tmp_path}/none.npz")
    *_, last = recorded.stderr.splitlines()
    assert recorded.returncode == 2 and "the data of table_2_100_5, dataset = npz:" in last
    one_sentence(command("run", "01", data=tmp_path / "absent"), "FL_PRIVACY_DATA", "absent")
    (tmp_path / "file").write_text("")
    one_sentence(command("run", "01", data=tmp_path / "file"), "not a folder")


@pytest.mark.usefixtures("untouched")
def test_a_truncated_file_is_named(tmp_path, data_root):
    shutil.copytree(data_root / "MNIST", tmp_path / "MNIST")
    broken = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    broken.chmod(0o644)
    broken.write_bytes(broken.read_bytes()[:100_000])
    one_sentence(
        command("run", "01", "dataset=mnist", data=tmp_path),
        "train-images-idx3-ubyte.gz",
        "damaged",
    )


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_passes_parameters_on():
    done = make("run", "NB=01", "P=clip_norm=-1 seed=3")
    assert done.returncode and "error: clip_norm = '-1'" in done.stderr


@pytest.mark.parametrize("goal", ["run", "params", "lab", "record"])
def test_make_asks_for_the_chapter_before_anything_is_set_up(goal):
    for words in ([goal], [goal, "NB="]):
        process = make(*words)
        assert (
            process.returncode == 2
            and f"name a chapter, for example make {goal} NB=01" in process.stderr
        )
        assert "setting up" not in process.stdout


@pytest.mark.parametrize("goal", ["params", "lab"])
def test_make_refuses_a_profile_where_there_is_none(goal):
    process = make(goal, "NB=01", "PROFILE=full")
    assert process.returncode == 2 and f"make {goal} has no profile" in process.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "nb=01"], "write NB, P and PROFILE in capitals, not nb"),
        (["run", "NB=01", "p=seed=3"], "write NB, P and PROFILE in capitals, not p"),
        (["run", "NB=01 02"], "one chapter at a time: NB=01"),
        (["run", "NB=01", "PROFILE="], "PROFILE is empty"),
        (["runn", "NB=01"], "make runn takes no chapter"),
    ],
)
def test_make_names_what_is_wrong_with_its_own_words(words, says):
    done = make(*words)
    assert done.returncode == 2 and says in done.stderr


def test_a_word_beside_p_is_not_dropped_in_silence():
    done = make("run", "NB=01", "dataset=digits")
    assert done.returncode and 'P="dataset=digits"' in done.stderr


def test_a_chapter_is_not_dropped_in_silence():
    done = make("book", "NB=05")
    assert done.returncode == 2 and "make book takes no chapter" in done.stderr
    assert "setting up" not in done.stdout


@pytest.mark.parametrize("command", ["run", "params", "lab", "record"])
def test_a_command_without_a_chapter_says_how_to_name_one(command, capsys):
    assert main([command]) == 2
    assert "name a chapter" in capsys.readouterr().err


def test_the_lab_copies_a_chapter_once(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "call", lambda words: opened.append(Path(words[-1])) or 0)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "05_fed_cdp.ipynb").write_text("the chapter")
    assert main(["lab", "05"]) == 0
    opened[0].write_text("my work")
    assert main(["lab", "05"]) == 0
    assert opened[0] == opened[1] and opened[1].read_text() == "my work"


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(InputError, match="runs cannot be written"):
        execution.check_disk(tmp_path / "runs")


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """Notebooks without a cell stand in for executed ones."""

    def execute(settings, target):
        target.parent.mkdir(exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(), target)

    monkeypatch.setattr(execution, "ROOT", tmp_path)
    monkeypatch.setattr(execution, "execute", execute)


def test_a_run_says_in_its_first_cell_what_it_has(executed):
    for changes, words in (
        ({"dataset": "syn_h"}, "`PROFILE=quick`, `dataset=syn_h`"),
        ({"dataset": "syn_l", "epsilon": "2"}, "`PROFILE=quick`, `dataset=syn_l`, `epsilon=2`"),
    ):
        path = execution.run(FedSel, "quick", changes)
        (cell,) = nbformat.read(path, nbformat.NO_CONVERT).cells
        assert cell.source.startswith(f"**This run has** {words}. It ended on ")
        assert cell.source.endswith("beside them.") and changes["dataset"] in path.name


def test_runs_on_other_data_do_not_meet(executed, monkeypatch):
    """What `auto` finds depends on the data folder, and so does the finished notebook's name."""
    found = iter(("digits", "mnist"))
    monkeypatch.setattr(execution, "first_available", lambda *_: next(found))
    monkeypatch.setattr(execution, "fetch", lambda *_: None)
    monkeypatch.setattr(execution, "verify", lambda *_: None)
    names = {execution.run(CHAPTERS["07"], "quick", {}).name for _ in range(2)}
    assert len(names) == 2 and all("digits" in n or "mnist" in n for n in names)


def test_the_sentences_of_a_run_hold_its_values(executed, monkeypatch):
    value = {"application/papermill.record/text/plain": r"'0.9\xa0± 0.1'"}
    named = {"scrapbook": {"name": "found"}}
    page = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_markdown_cell("It is {glue:text}`found`, not {glue:text}`lost.one`."),
        nbformat.v4.new_code_cell("glue('found', ...)", outputs=[
            nbformat.v4.new_output("display_data", value, metadata=named),
            nbformat.v4.new_output("stream", text="a line")]),
    ])  # fmt: skip
    monkeypatch.setattr(execution, "execute", lambda settings, target: nbformat.write(page, target))
    (execution.ROOT / "runs").mkdir()
    _, text, _ = nbformat.read(execution.run(FedSel, "quick", {}), nbformat.NO_CONVERT).cells
    assert text.source == "It is 0.9\xa0± 0.1, not {glue:text}`lost.one`."


def test_long_lists_of_parameters_do_not_meet(executed):
    long = {
        "model": "logistic_regression",
        "epsilon": "2",
        "batch_share": "0.05",
        "discount": "0.95",
        "dataset": "syn_l",
        "largest_dimension": "100",
        "server_lr": "0.1",
    }
    assert (
        len(
            {
                execution.run(FedSel, "smoke", long | {"value": value})
                for value in ("pm", "hm", "duchi")
            }
        )
        == 3
    )


def test_no_gpu_and_no_space_are_said_at_once(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no CUDA device"):
        execution.resolved(ThreatTypes(device="cuda", dataset="digits", batch_dataset="same"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 2**20))
    with pytest.raises(InputError, match="only 1 MiB are free"):
        execution.check_disk(tmp_path)


def tiny(**changes):
    return threat_types.Point(
        "digits",
        "type_2",
        "non_private",
        "naive",
        victims=1,
        max_iterations=2,
        clients=100,
        **changes,
    )


@pytest.fixture
def points_in(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path / "points")
    return tmp_path / "points"


def test_finished_points_are_not_computed_again(points_in, monkeypatch, capsys):
    import torch

    device = torch.device("cpu")
    cells = [tiny(), replace(tiny(), method="fed_sdp_client"), tiny(seed=1)]
    first = dict(run.EXPERIMENT.finish(cells, device, workers=1))
    assert len(list(points_in.iterdir())) == 2  # two cells share their observation
    begun, *_, ended = capsys.readouterr().err.splitlines()
    assert begun == "· to compute: 2 of 2 points" and ended.endswith("; the last of these")
    monkeypatch.setattr(run.leakage, "measure", lambda *_: pytest.fail("computed again"))
    again = dict(run.EXPERIMENT.finish(cells, device, workers=1))
    assert all((again[p]["mse"] == first[p]["mse"]).all() for p in cells)
    assert capsys.readouterr().err.splitlines() == ["· to compute: 0 of 2 points"]


def test_a_file_of_ones_own_that_changes_is_attacked_anew(points_in, tmp_path):
    import numpy as np
    import torch

    path, rng = tmp_path / "mine.npz", np.random.default_rng(0)
    results = []
    for _ in range(2):
        images, labels = rng.random((30, 28, 28)), np.arange(30) % 3
        np.savez(
            path, train_images=images, train_labels=labels, test_images=images, test_labels=labels
        )
        loading.load_cached.cache_clear()
        point = replace(tiny(), dataset=f"npz:{path}", batch_size=3)
        ((_, result),) = run.EXPERIMENT.finish([point], torch.device("cpu"), workers=1)
        results.append(result)
    assert (results[0]["truth"] != results[1]["truth"]).any()


def test_a_point_about_a_training_follows_its_file_too(tmp_path):
    """The data set of a utility bound stands in the training that it is about."""
    from fl_privacy_lib.chapters.fed_cdp.run import EXPERIMENT
    from fl_privacy_lib.chapters.fed_cdp.utility import Utility
    from fl_privacy_lib.reproduction.experiments.training import Training

    path, found = tmp_path / "mine.npz", []
    for content in (b"one", b"two"):
        path.write_bytes(content)
        found.append(EXPERIMENT.identity(Utility(Training(f"npz:{path}", "fed_cdp", "code"))))
    assert found[0] != found[1] and found[0]["arm"] == found[1]["arm"]


def test_parameters_are_listed_with_what_they_may_be():
    done = command("params", "01")
    assert "start = patterned [patterned | normal]" in done.stdout
    assert "victims = 16 [≥ 1, ≤ 1000]" in done.stdout


def test_a_port_in_use_gets_one_sentence(monkeypatch, tmp_path):
    import socket

    from fl_privacy_lib import __main__
    from fl_privacy_lib.reproduction import paths

    monkeypatch.setattr(paths, "BUILD", tmp_path)
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "index.html").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="name another with --port"):
            __main__._serve(taken.getsockname()[1])
    with pytest.raises(InputError, match="port 99999 cannot be used"):
        __main__._serve(99999)


def test_a_recording_writes_rows_as_points_finish_and_resumes(
    tmp_path, points_in, monkeypatch, capsys
):
    settings = ThreatTypes(dataset="digits", victims=1, batch_victims=1, max_iterations=1)
    ran, real = [], run.leakage.measure

    def interrupted(point, *rest):
        ran.append(point)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(point, *rest)

    monkeypatch.setattr(run.leakage, "measure", interrupted)
    monkeypatch.setattr(experiment.os, "cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        experiment.record(run.EXPERIMENT, settings, "fed_cdp/table_7", tmp_path)
    path = tmp_path / "fed_cdp" / "table_7.csv"
    first_rows, took = path.read_text(), experiment.recorded_rows(path, {}).seconds
    assert len(ran) == 3 and first_rows.count("attack_success_rate") >= 2
    monkeypatch.setattr(
        run.leakage, "measure", lambda point, *rest: ran.append(point) or real(point, *rest)
    )
    assert "rows there took" not in capsys.readouterr().err  # nothing was recorded yet
    experiment.record(run.EXPERIMENT, settings, "fed_cdp/table_7", tmp_path)
    assert path.read_text().startswith(first_rows)
    cost = f"; rows there took {took.min():.0f} to {took.max():.0f} s"
    assert capsys.readouterr().err.splitlines()[0].endswith(cost)
    grid = threat_types.recorded_grid(settings, ("digits",))["fed_cdp/table_7"]
    assert len(ran) == 3 + len({point.view for point in grid}) - 2


def test_a_recording_refuses_a_parameter_that_changes_none_of_its_points(tmp_path):
    plain = ThreatTypes.of_profile("smoke", dataset="digits")
    with pytest.raises(InputError, match=r"batch_size = 7 changes nothing that chapter 01"):
        changed = plain.model_copy(update={"batch_size": 7})
        experiment.record(run.EXPERIMENT, changed, "fed_cdp/table_7", tmp_path, plain)
    assert not list(tmp_path.iterdir())


def test_a_recording_refuses_another_seed_and_a_misspelt_data_set(tmp_path):
    plain = ThreatTypes.of_profile("smoke", dataset="digits")
    for change, message in (
        ({"seed": 7}, "records have seed = 0: give seed = 7 to a run"),
        ({"dataset": "digit"}, r"dataset = 'digit' is not one of .* \(did you mean digits\?\)"),
    ):
        changed = plain.model_copy(update=change)
        for only in ("fed_cdp/table_7", None):
            with pytest.raises(InputError, match=message):
                experiment.record(run.EXPERIMENT, changed, only, tmp_path, plain)
    assert not list(tmp_path.iterdir())


def test_a_chapter_without_a_seed_is_recorded_too(tmp_path):
    plain = CountingPrivacy.of_profile("full")
    with pytest.raises(InputError, match="chapter 03 records no 'nothing'"):
        experiment.record(chapter_experiment(CountingPrivacy), plain, "nothing", tmp_path, plain)


@pytest.mark.parametrize("chapter", ["02", "05", "06"])
def test_what_a_search_or_a_record_has_to_decide_first_refuses_no_parameter(
    chapter, tmp_path, monkeypatch
):
    kind = CHAPTERS[chapter]
    plain = kind.of_profile("full")
    asked = kind.of_profile("full", dataset="digits", seeds=plain.seeds + 1)
    only = {"02": None, "05": "table_2_100_5", "06": "table_4"}[chapter]
    monkeypatch.setattr(experiment, "_record_rows", lambda *_: None)
    try:
        experiment.record(chapter_experiment(kind), asked, only, tmp_path, plain)
    except InputError as error:
        assert "changes nothing" not in str(error)


def test_a_recording_names_the_long_parts_that_it_leaves_out(tmp_path, monkeypatch, capfd):
    kind = CHAPTERS["09"]
    settings = kind.of_profile("smoke", device="cpu")
    monkeypatch.setattr(experiment, "_record_rows", lambda *_: None)
    monkeypatch.setattr(experiment, "only_available", lambda datasets: datasets)
    for only, said in ((None, 1), ("mechanisms", 0)):
        experiment.record(chapter_experiment(kind), settings, only, tmp_path)
        assert "".join(capfd.readouterr()).count("table_3a_gia") == said


def test_an_unknown_part_is_named_beside_the_nearest(tmp_path):
    with pytest.raises(InputError, match=r"did you mean fed_cdp/table_7\?"):
        experiment.record(run.EXPERIMENT, ThreatTypes(), "fed_cdp/table7", tmp_path)


@pytest.mark.long
def test_a_killed_recording_leaves_a_whole_record(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fl_privacy_lib.reproduction import experiment;"
        "from fl_privacy_lib.chapters.threat_types import run;"
        "from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes;"
        "experiment.point_cache = lambda c: Path(sys.argv[1]) / 'points';"
        "experiment.os.cpu_count = lambda: 1;"
        "s = ThreatTypes(dataset='digits', victims=1, batch_victims=1, max_iterations=1);"
        "experiment.record(run.EXPERIMENT, s, 'fed_cdp/table_7', Path(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL, cwd=ROOT
    )
    path = tmp_path / "fed_cdp" / "table_7.csv"
    deadline = time.time() + 120
    while not path.exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    from fl_privacy_lib.reproduction.records import recorded_rows

    points = threat_types.recorded_grid(ThreatTypes(dataset="digits"), ("digits",))[
        "fed_cdp/table_7"
    ]
    assert len(recorded_rows(path, threat_types.record_key(points[0]))) > 0


@pytest.mark.long
def test_a_notebook_that_stops_leaves_no_finished_file(tmp_path, monkeypatch):
    settings = ThreatTypes(dataset="npz:/nowhere/none.npz", batch_dataset="same")
    target = tmp_path / "01.ipynb"
    with pytest.raises(InputError, match=r"01_threat_types stopped: .*none\.npz"):
        execution.execute(settings, target)
    assert not target.exists() and target.with_suffix(".partial.ipynb").exists()


def test_serving_without_a_book_says_what_to_do(monkeypatch, tmp_path):
    from fl_privacy_lib import __main__
    from fl_privacy_lib.reproduction import paths

    monkeypatch.setattr(paths, "BUILD", Path(tmp_path))
    with pytest.raises(InputError, match="make book"):
        __main__._serve(0)


SLOW = """
import sys, time
from dataclasses import dataclass
from pathlib import Path

from fl_privacy_lib import __main__
from fl_privacy_lib.reproduction.experiment import Experiment


@dataclass(frozen=True)
class Point:
    number: int


class Slow(Experiment):
    chapter = "slow"
    parts = None

    def run(self, point, device):
        Path(f"begun_{point.number}").touch()
        time.sleep(600)


if __name__ == "__main__":
    __main__._dispatch = lambda options: list(
        Slow().finish([Point(number) for number in range(6)], workers=2)
    )
    sys.exit(__main__.main(["record", "01"]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_pool_says_one_sentence(stop, status, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with started("slow.py", cwd=tmp_path) as process:
        wait_for(process, lambda: len(list(tmp_path.glob("begun_*"))) >= 2)
        os.killpg(process.pid, stop)  # as a terminal does
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    begun, *end = said.splitlines()
    assert begun == "· to compute: 6 of 6 points"
    assert end == ["interrupted: finished points are kept; the same command continues."]
