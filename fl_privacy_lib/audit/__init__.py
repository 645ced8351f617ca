"""What a defence's ε is worth: as the paper counts it, and what can be proved.

``statements``      the two statements on a training, with their reasons
``participants``    how often an example's holders take part, and the ε of an adversary who sees it
``arguments``       numbers that show why some published steps do not give what they are used for
"""

from fl_privacy_lib.audit.arguments import (
    gaussian_loss_exceeds,
    global_rate,
    l2_max_epsilon,
    sampled_gaussian_lower_bound,
    shared_in_a_round,
)
from fl_privacy_lib.audit.participants import (
    mixture_epsilon,
    participations,
    quantile,
    visible_participation,
)
from fl_privacy_lib.audit.statements import Statement, Statements, local_statement, statement

__all__ = [
    "Statement",
    "Statements",
    "gaussian_loss_exceeds",
    "global_rate",
    "l2_max_epsilon",
    "local_statement",
    "mixture_epsilon",
    "participations",
    "quantile",
    "sampled_gaussian_lower_bound",
    "shared_in_a_round",
    "statement",
    "visible_participation",
]
