"""What a defence's ε is worth: as the paper counts it, and what can be proved.

``statements``      the two statements on a training, with their reasons
``arguments``       who takes part how often, the ε of an adversary who sees it, and numbers that
                    show why some published steps do not give what they are used for
``local``           the exact ε of locally private reports
"""

from fl_privacy_lib.audit.arguments import (
    global_rate,
    l2_max_epsilon,
    mixture_epsilon,
    participations,
    visible_participation,
)
from fl_privacy_lib.audit.statements import Statement, Statements, local_statement, statement

__all__ = [
    "Statement",
    "Statements",
    "global_rate",
    "l2_max_epsilon",
    "local_statement",
    "mixture_epsilon",
    "participations",
    "statement",
    "visible_participation",
]
