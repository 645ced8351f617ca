"""The compiled engine: kernels of explicit vector operations (numba) for the papers' CNN and MLP.

One client at a time, so that its weights, activations and gradients stay in a core's L2 cache; all
of a participation's local iterations in one call, without Python between them; no work on what ReLU
and the maximum have set to zero. The gradients are exact up to rounding, and the noise is drawn
where it is added.

`vectors` has the operations, `gaussian` the noise, `convolutions` the CNN's layers, `kernel` the
dense ones and the iterations. `network` recognises the models and lays out the memory, `form`
translates a defence, `engine` calls the kernel. numba is imported and the kernel compiled
when a simulation first uses it.
"""

from importlib.util import find_spec

from torch import nn

from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.federated.compiled.engine import hits as compiled_hits
from fl_privacy_lib.federated.compiled.form import is_supported
from fl_privacy_lib.federated.compiled.network import Network, network_of
from fl_privacy_lib.federated.participation import Examples

__all__ = ["compiled_form", "compiled_hits"]


def compiled_form(
    model: nn.Module, train: Examples, defense: Defense | None = None
) -> Network | str:
    """Return the model in a kernel's form, or what the engine does not know."""
    if find_spec("numba") is None:
        return "numba is not installed (the extra 'fast')"
    if defense is not None and not is_supported(defense):
        return f"the defence {defense.name!r} has a local rule"
    return network_of(model, train) or "the model or its examples have a form"
