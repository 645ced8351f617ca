"""The registry of methods: one entry brings a defence into every table, attack and account."""

import inspect
import json
import re
from dataclasses import dataclass

import pandas as pd
import pytest
import torch

from fl_privacy_lib import audit
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.threat_types import grid, run
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.defenses import Defense, Holding, Transformation, registry
from fl_privacy_lib.defenses.registry import METHODS, Method, build
from fl_privacy_lib.defenses.stage import Context
from fl_privacy_lib.reproduction import experiment
from fl_privacy_lib.reproduction.experiments.cells import Cell
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.paths import ROOT
from fl_privacy_lib.reproduction.verdict import Status
from fl_privacy_lib.sampling import Plan

PLAN, HOLDING = Plan(20, 5, 3, 2, 4, local_lr=0.1), Holding(400, 20, 3)


def test_a_setting_that_no_method_takes_is_refused():
    with pytest.raises(InputError, match=r"'nois_scale' is not one of .*mean noise_scale\?"):
        build("fed_cdp", nois_scale=3)
    assert build("non_private", noise_scale=3) == build("non_private")


# ---- the worked example of the page "Add your own defence"
@dataclass(frozen=True)
class Signs(Transformation):
    """Send the sign of each coordinate, times its tensor's mean magnitude."""

    def __call__(self, values, ctx):
        """Return updates [clients, …] of signs and one number a tensor."""
        signs = {}
        for name, v in values.items():
            scale = v.abs().flatten(1).mean(1)  # [clients]
            signs[name] = torch.einsum("k,k...->k...", scale, v.sign())
        return signs


SIGNS = Method("sign compression", lambda: Defense("signs", per_client=Signs()))
# ----


@pytest.fixture
def signs(monkeypatch):
    monkeypatch.setitem(METHODS, "signs", SIGNS)


def test_the_page_runs_as_it_is_printed(monkeypatch, tmp_path, capsys):
    page = (ROOT / "book" / "own_defence.md").read_text()
    assert inspect.getsource(Signs) in page
    monkeypatch.setitem(METHODS, "signs", None)  # removed again after the test
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path)
    entry, attack, cost, statement, noised = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(entry, vars(registry) | {"METHODS": METHODS})
    exec(attack.replace(": 4", ": 1").replace(": 20", ": 1"), {})
    exec(cost.replace("30, 10, 4", "1, 1, 4"), {})
    exec(statement, {})
    exec(noised, page_names := {"__name__": "page"})
    *printed, nothing, client, example = [
        line for line in capsys.readouterr().out.splitlines() if line[0] != "·"
    ]
    named = [line.split()[0] for line in printed]
    assert named == ["non_private", "signs"] + ["non_private"] * 3 + ["signs"] * 3
    assert "ε = inf" in nothing and "for one client" in client and "for one example" in example
    stage, update = page_names["Squashed"](), {"w": torch.full((2, 100), 3.0)}  # norm 30
    short = stage.noiseless()(update, Context(0, [0, 1], []))["w"]
    assert torch.allclose(short.norm(dim=1), torch.tensor(4 * 30 / 34))


def test_the_method_of_an_exercise_is_registered_as_it_is_printed(monkeypatch):
    cells = json.loads((ROOT / "notebooks" / "02_adaptive_attacks.ipynb").read_text())["cells"]
    (text,) = ("".join(c["source"]) for c in cells if ":label: ex-mask" in "".join(c["source"]))
    (code,) = re.findall(r"```python\n(.*?)```", text.split("ex-public")[0], re.S)
    monkeypatch.setitem(METHODS, "lying", None)  # removed again after the test
    exec(code, {})
    sent = build("lying").per_example(
        {"w": torch.ones(1, 1, 10)}, Context(0, [0], [torch.Generator()])
    )
    assert 0 < sent["w"].abs().min() < 0.01  # dropped, and no exact zero


def test_the_script_on_the_page_about_rerunning_runs(monkeypatch, tmp_path, capsys):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "book" / "rerun.md").read_text(), re.S)
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(script.replace('"rounds": 10', '"rounds": 1'), {})
    assert list(pd.read_csv("noise.csv")["noise_scale"]) == [0.5, 2.0, 6.0]
    assert capsys.readouterr().out.split(":")[0] in list(Status)


def test_the_script_on_the_library_page_runs(capsys):
    page = (ROOT / "book" / "api.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert script.count("clip_aware=True") == 1
    exec(script.replace("clip_aware=True", "clip_aware=True, max_iterations=2"), {})
    accuracy, proved, attacked = capsys.readouterr().out.splitlines()
    assert 0 <= float(accuracy) <= 1 and "ε = " in proved and "['budget']" in attacked


def test_the_example_is_twelve_lines():
    lines = inspect.getsource(Signs).splitlines() + inspect.getsource(SIGNS.builder).splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 12


def test_it_stands_in_the_live_table_where_it_shows_something_of_its_own(signs):
    points = grid.grid(ThreatTypes(), "digits", 100)
    by_threat = {p.threat_type: p for p in points if p.method == "signs"}
    assert set(by_threat) == {"type_2", "type_1"} and named("signs") == "sign compression"
    assert by_threat["type_2"].view.method == "non_private"  # nothing has happened at that tap
    assert by_threat["type_1"].view.method == "signs"
    assert {p.attacker for p in points if p.method == "signs"} == {"naive"}  # nothing is clipped


def test_it_is_attacked_like_all_others(signs, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path)
    small = {"victims": 1, "max_iterations": 1, "clients": 100}
    points = [
        grid.Point("digits", "type_1", "signs", "naive", **small),
        Cell("digits", "signs", arm="prior", seeds=1, **small),
    ]
    for _, result in run.EXPERIMENT.finish(points, workers=1):
        assert result["images"].shape == (1, 1, 1, 28, 28)


def test_what_it_keeps_is_signs_and_scales(signs):
    update = {"w": torch.tensor([[[1.0, -3.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, -1.0]]])}
    kept = build("signs").per_client(update, None)["w"]
    assert kept.tolist() == [[[2, -2], [0, 2]], [[1, 1], [1, -1]]]


def test_it_is_audited_and_accounted_for_and_nothing_is_proved(signs):
    defense = build("signs", clip_norm=4.0, noise_scale=6.0)
    statement = audit.statement(defense, PLAN, HOLDING, delta=1e-5)
    assert statement.proved.epsilon == float("inf") and statement.proved.reasons
    with pytest.raises(InputError, match="signs has no events"):
        defense.events(PLAN, HOLDING)


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_builds_from_any_settings_and_has_a_title(name):
    settings = {
        "clip_norm": 2.0,
        "noise_scale": 3.0,
        "level": 0.25,
        "at": "per_client",
        "rounds": 7,
    }
    assert isinstance(build(name, **settings), Defense)
    assert named(name) == METHODS[name].title != name


def test_a_misspelt_method_is_named():
    with pytest.raises(InputError, match="did you mean fed_cdp_batch"):
        build("fed_cdp_bacth")
    assert registry.METHODS is METHODS
