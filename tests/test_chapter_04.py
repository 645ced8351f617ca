"""Chapter 04: every engine gives the loop's update, its records are whole, its exercise can be solved and failed."""

import json
import re
import types

import pytest
import torch

from fl_privacy_lib.chapters.fast_training import engines as chapter
from fl_privacy_lib.chapters.fast_training.parameters import FastTraining
from fl_privacy_lib.chapters.fast_training.run import KEYS, record
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.reproduction.claims import load_claims, verdict
from fl_privacy_lib.reproduction.paths import MEASURED, ROOT
from fl_privacy_lib.reproduction.records import MeasuredTable
from tools import bench


@pytest.mark.parametrize("dataset", chapter.FEDERATED)
@pytest.mark.parametrize("clip_norm", [4.0, 0.05, None])
def test_the_fast_engine_gives_the_update_of_the_loop_as_written(dataset, clip_norm):
    double = chapter.doubled(chapter.FEDERATED[dataset].scene(3, 2, seed=1))
    defense = fed_cdp(clip_norm=clip_norm, noise_scale=0.0) if clip_norm else non_private()
    exact = chapter.Written(clip_norm, noise_scale=0.0)(double)
    assert chapter.distance(chapter.fast(defense)(double), exact) < 1e-10
    other = chapter.Written(3.9 if clip_norm == 0.05 else 0.05, noise_scale=0.0)(double)
    assert chapter.distance(other, exact) > 1e-3, "the distance sees another clip"


@pytest.mark.parametrize("largest, on_batch", [(False, False), (True, False), (False, True), (True, True)])
def test_the_loop_s_noise_has_the_spread_it_says(largest, on_batch):
    scene, sigma, bound = chapter.FEDERATED["cancer"].scene(1, 1), 2.0, 50.0
    quiet = chapter.Written(bound, 0.0)(scene)
    loud = chapter.Written(bound, sigma, largest=largest, on_batch=on_batch)(scene)
    noise = torch.cat([(loud[n] - quiet[n]).flatten() for n in quiet])
    scale = bound
    if largest:
        norms = []
        for x, y in zip(*(v[scene.batches()[0][0]] for v in (scene.x, scene.y)), strict=True):
            loss = torch.nn.functional.cross_entropy(scene.model(x[None]), y[None])
            norms += [float(g.norm()) for g in torch.autograd.grad(loss, list(scene.model.parameters()))]
        scale = max(norms)
    batch = scene.plan.batch_size
    expected = scene.plan.local_lr * sigma * scale * (1 if on_batch else batch**0.5) / batch
    assert float(noise.std()) == pytest.approx(expected, rel=0.02)  # 78,200 draws: below 1e-12 to fail by chance


def test_fed_sdp_clips_and_noises_the_update_once():
    scene = chapter.FEDERATED["cancer"].scene(2, 2)
    plain = chapter.Written(None)(scene)
    tight = chapter.Written(1e-3, 0.0, at_update=True)(scene)
    assert all(float(t.norm()) <= 1e-3 * (1 + 1e-4) for t in tight.values())
    loose = chapter.Written(1e3, 0.0, at_update=True)(scene)
    assert chapter.distance(loose, plain) < 1e-6


def test_a_recording_is_whole_resumes_and_names_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(chapter, "FEDERATED", {"cancer": chapter.FEDERATED["cancer"]})
    settings = FastTraining(repetitions=1)
    record(settings, "fed_cdp/table_3", tmp_path)
    path = tmp_path / "fed_cdp" / "table_3.csv"
    text, frame = path.read_text(), MeasuredTable(path, [*KEYS, "metric"]).frame()
    assert {(r["engine"], r["method"]) for _, r in frame.iterrows()} == {
        *(("as_written", m) for m in chapter.WRITTEN["fed_cdp/table_3"]),
        *(("stacked", m) for m in chapter.STACKED["fed_cdp/table_3"]),
    }
    base = frame[(frame["method"] == "non_private") & (frame["metric"] == "ratio_to_non_private")]
    assert (base["mean"] == 1).all() and len(base) == 2
    monkeypatch.setattr(chapter, "measure", lambda *_: pytest.fail("recorded again"))
    record(settings, "fed_cdp/table_3", tmp_path)
    assert path.read_text() == text


def test_the_recorded_tables_give_every_verdict():
    for claim in load_claims():
        if claim["chapter"] == "04":
            assert verdict(claim).cells, claim["id"]


def test_the_bench_s_record_has_every_engine_and_workload():
    import pandas as pd

    frame = pd.read_csv(MEASURED / "performance.csv")
    assert list(frame.columns) == bench.COLUMNS
    for workload in bench.WORKLOADS:
        own = frame[frame["workload"] == workload]
        expected = {e for e in bench.ENGINES if not e.startswith("opacus_")} | {"opacus"}
        assert set(own["engine"]) - set(bench.COMPILED) == expected
        private = own[own["engine"] == "ours_private"][["participants", "workers"]]
        found = set(private[["participants", "workers"]].itertuples(index=False, name=None))
        assert {(20, 1), (100, 1), (100, 2), (1000, 1)} <= found


def test_the_coding_exercise_can_be_solved_and_failed():
    notebook = json.loads((ROOT / "notebooks" / "04_fast_private_training.ipynb").read_text())
    check = next("".join(c["source"]) for c in notebook["cells"] if "def check_my_norms" in "".join(c["source"]))
    solutions = (ROOT / "book" / "solutions_04.md").read_text()
    solutions = (ROOT / "book" / "solutions_04.md").read_text()
    solution = re.search(r"```python\n(def my_norms.*?)```", solutions, re.S).group(1)
    module = types.ModuleType("exercise")
    module.__dict__["torch"] = torch
    exec(check.partition("\n\n\ntry:")[0] + "\n" + solution, module.__dict__)
    assert module.check_my_norms(module.my_norms)
    assert not module.check_my_norms(lambda g, x: g.norm(dim=2) * x.norm(dim=2))  # the bias forgotten
    formed = lambda g, x: torch.cat([(g[..., None] * x[:, :, None]).flatten(2), g], dim=2).norm(dim=2)  # noqa: E731
    assert not module.check_my_norms(formed)
