"""Chapter 01's grid: equal observations are equal bit for bit, recorded rows come out again."""

import ast
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_privacy_lib.chapters.threat_types import grid as threat_types
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.chapters.threat_types.run import EXPERIMENT
from fl_privacy_lib.data import load
from fl_privacy_lib.reproduction.comparison import measured, select
from fl_privacy_lib.reproduction.experiments import leakage, scoring
from fl_privacy_lib.reproduction.experiments.setups import clients_of
from fl_privacy_lib.reproduction.paths import ROOT, decoded_cache

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return load("digits", tmp_path_factory.mktemp("none"))


def base(threat, method, **changes):
    return threat_types.Point(
        "digits", threat, method, "naive", victims=2, batch_size=3, clients=100, **changes
    )


@pytest.mark.parametrize("threat", threat_types.THREATS)
@pytest.mark.parametrize("method", threat_types.RECORDED)
def test_a_point_and_its_view_observe_the_same_bits(digits, threat, method):
    point = base(threat, method)
    of_point, of_view = (leakage.scene(p, digits, 0, CPU) for p in (point, point.view))
    assert (of_point.truth == of_view.truth).all()
    for a, b in zip(of_point.observations, of_view.observations, strict=True):
        assert all(torch.equal(a.values[name], b.values[name]) for name in a.values)


def test_views_that_differ_observe_different_bits(digits):
    views = {
        p.view for p in threat_types.grid(ThreatTypes(victims=2, batch_victims=2), "digits", 100)
    }
    seen = {}
    for view in views:
        observation = leakage.scene(view, digits, 0, CPU).observations[0]
        key = (view.threat_type, view.method)
        seen[key] = torch.cat([v.flatten() for v in observation.values.values()]).numpy().tobytes()
    assert len(set(seen.values())) == len(seen)


def test_the_truth_is_what_the_victims_hold(digits):
    scene = leakage.scene(base("type_1", "non_private", local_iterations=2), digits, 0, CPU)
    assert scene.truth.shape == (2, 6, 1, 28, 28) and scene.labels.shape == (2, 6)
    pool = {x.tobytes(): y for x, y in zip(digits.train_x, digits.train_y, strict=True)}
    for image, label in zip(scene.truth.reshape(-1, 1, 28, 28), scene.labels.ravel(), strict=True):
        assert pool[np.ascontiguousarray(image).tobytes()] == label


def test_iterations_to_success_count_from_the_first_success():
    truth = np.random.default_rng(0).random((1, 2, 1, 12, 12)).astype(np.float32)
    reached, score = scoring.first_successes(truth, 30)
    blank = torch.zeros(1, 2, 1, 12, 12)
    half = blank.clone()
    half[0, 1] = torch.as_tensor(truth[0, 0])  # the first image, in the second place
    rows = torch.tensor([0])
    for iteration, images in ((1, blank), (4, half), (9, torch.as_tensor(truth)), (11, blank)):
        score(iteration, rows, images)
    assert reached.tolist() == [[4, 9]]


def test_the_summary_averages_images_and_spreads_over_seeds():
    result = {
        k: np.array([[0.0], [0.2], [0.4], [0.6]]) for k in ("mse", "ssim", "grey_mse", "mean_mse")
    }
    result |= {
        k: np.array([[1], [1], [0], [0]], dtype=bool)
        for k in ("success", "label_right", "mean_success")
    }
    result |= {
        "iterations": np.array([[3], [60], [30], [30]]),
        "attack_iterations": np.array([3, 60, 30, 30]),
        "status": np.array(["converged", "stalled", "stalled", "diverged"]),
    }
    table = scoring.summary(result, seeds=2)
    assert table["mse"] == {"mean": pytest.approx(0.3), "std": pytest.approx(0.2), "n": 4}
    assert (
        table["attack_success_rate"]["mean"] == 0.5 and table["attack_success_rate"]["std"] == 0.5
    )
    assert table["success_by_50"]["mean"] == 0.25 and table["stalled_fraction"]["mean"] == 0.5


@pytest.mark.long
def test_type_2_on_mnist_succeeds_without_a_defence(data_root):
    """The quick profile's promise of 90 %, asked of twice its victims: 3 of 32 may be missed."""
    data = load("mnist", data_root, decoded_cache())
    settings = ThreatTypes.of_profile("quick")
    point = threat_types.grid(settings, "mnist", clients_of(data))[0]
    assert (point.threat_type, point.method, point.victims) == ("type_2", "non_private", 16)
    assert EXPERIMENT.run(replace(point, victims=32), CPU)["success"].mean() >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("threat", ["type_2", "type_0_1"])
def test_recorded_rows_come_out_again(data_root, threat):
    """A stratified sample of the records comes within 3 standard errors with other victims."""
    record = measured("fed_cdp/table_7")
    arms = ["non_private", "fed_cdp_example"] if threat == "type_2" else ["fed_cdp_example"]
    cell = {"threat_type": threat, "dataset": "mnist", "attacker": "naive", "arm": arms}
    chosen = select(record, cell | {"metric": "attack_success_rate"})
    chosen = chosen[~chosen["device"].str.contains("NVIDIA")]
    assert len(chosen) == len(arms)
    for _, row in chosen.iterrows():
        kind = "type_1" if threat == "type_0_1" else threat
        point = threat_types.Point(
            row["dataset"],
            kind,
            row["arm"],
            row["attacker"],
            victims=8,
            batch_size=int(row["batch_size"]),
            clip_norm=float(row["clip_norm"]),
            noise_scale=float(row["noise_scale"]),
            max_iterations=20,
            seed=7,
        )
        result = EXPERIMENT.run(point, CPU)
        # a rate of 0 or 1 has no spread of its own; two per cent stand in for it
        spread = np.sqrt(max(row["mean"] * (1 - row["mean"]), 0.02) / result["success"].size)
        assert abs(float(result["success"].mean()) - row["mean"]) <= 3 * spread


def notebook_cells():
    path = ROOT / "notebooks" / f"{ThreatTypes.notebook}.ipynb"
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def test_the_pictures_show_a_recovered_image_where_there_is_one():
    """The notebook's own choice of a client, on outcomes made up for it."""
    scope = {"np": np}
    for cell in notebook_cells():
        for node in ast.parse("".join(cell["source"])).body:
            if isinstance(node, ast.FunctionDef) and node.name == "first_recovered":
                exec(ast.unparse(node), scope)
    outcome = {"success": np.zeros((4, 2), dtype=bool), "images": np.zeros((3, 2))}
    assert scope["first_recovered"](outcome) == (0, 0)  # none: the first
    outcome["success"][3, 0] = True  # of another seed, without a picture
    assert scope["first_recovered"](outcome) == (0, 0)
    outcome["success"][1, 1] = outcome["success"][2, 0] = True
    assert scope["first_recovered"](outcome) == (1, 1)


@pytest.mark.parametrize("name", ["opening", "aware", "batch", "failures"])
def test_which_reconstructions_succeed_is_computed_and_not_described(name):
    """An alternative text is fixed, the data are not: it leaves outcomes to a computed caption."""
    figure = next(
        cell["metadata"]["mystnb"]
        for cell in notebook_cells()
        if cell["metadata"].get("mystnb", {}).get("figure", {}).get("name") == f"fig-{name}"
    )
    assert "aption" in figure["image"]["alt"]
    glued = figure["figure"]["caption"].split("{glue:text}`")[1:]
    outcomes = {part.split("`")[0] for part in glued} - {"dataset"}
    source = "\n".join("".join(cell["source"]) for cell in notebook_cells())
    assert outcomes and all(f'glue("{key}"' in source for key in outcomes)
