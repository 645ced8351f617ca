"""Parameters of the chapter on local privacy."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_privacy_lib.reproduction.settings import Device, Settings


class FedSel(Settings):
    """Parameters of notebook 08, `fedsel`."""

    notebook: ClassVar[str] = "08_fedsel"
    auto_datasets: ClassVar[tuple[str, ...]] = ("adult_123", "syn_l")
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"repetitions": 1, "folds": 2, "draws": 20, "largest_dimension": 100},
        "full": {"repetitions": 5, "folds": 5, "draws": 400, "largest_dimension": 10_000},
    }
    dataset: Literal["auto", "syn_l", "syn_h", "bank", "kdd99", "adult_123", "cancer"] = Field(
        "auto",
        description="the clients' records; auto: adult_123 where its files are, else syn_l",
    )
    model: Literal["logistic_regression", "svm"] = Field(
        "logistic_regression", description="loss of the linear model"
    )
    epsilon: float = Field(1.0, gt=0, le=100, description="budget ε of one participation")
    ratio: float = Field(0.1, gt=0, lt=1, description="share μ of ε for the selection")
    top_share: float = Field(
        0.1, gt=0, lt=1, description="share k/d of the coordinates that count as top"
    )
    value: Literal["pm", "hm", "duchi", "laplace"] = Field(
        "pm", description="perturbation of the value"
    )
    server_lr: float = Field(0.1, gt=0, le=1000, description="learning rate η, at the server")
    discount: float = Field(0.9, ge=0, lt=1, description="discount γ of the momentum")
    l2: float = Field(1e-4, ge=0, le=10, description="ℓ2 regularisation")
    batch_share: float = Field(0.01, gt=0, le=1, description="share of the clients in a round, b/n")
    epochs: int = Field(1, ge=1, le=100, description="passes over the clients; each costs ε again")
    repetitions: int = Field(1, ge=1, le=100, description="cross-validations with new folds")
    folds: int = Field(3, ge=2, le=100, description="folds of a cross-validation")
    draws: int = Field(
        100, ge=20, le=100_000, description="repeated draws where noise and times are measured"
    )
    largest_dimension: int = Field(
        1000, ge=100, le=100_000, description="largest d of the panels over d"
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="seed of folds, order of clients and all draws"
    )
    device: Device = Field("auto", description="without effect: the chapter uses the CPU alone")
