"""Recording: run a chapter's grid at a profile and write one row per finished point and metric.

Plain Python, no notebook. A point that stands in the record is not run again, so that an interrupted recording goes
on where it stopped and loses at most the point under way.
"""

from collections.abc import Callable

from fl_privacy_lib.reproduction.recording_counting import record_counting_privacy
from fl_privacy_lib.reproduction.recording_fed_cdp import record_fed_cdp
from fl_privacy_lib.reproduction.recording_fedsel import record_fedsel
from fl_privacy_lib.reproduction.recording_leakage import record_adaptive_attacks, record_threat_types
from fl_privacy_lib.reproduction.recording_speed import record_fast_training

RECORDERS: dict[str, Callable[..., None]] = {
    "01": record_threat_types,
    "02": record_adaptive_attacks,
    "03": record_counting_privacy,
    "04": record_fast_training,
    "05": record_fed_cdp,
    "08": record_fedsel,
}
"""Chapter → its recording: ``record(settings, only='paper/table' or None)``."""
