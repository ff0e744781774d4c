"""What `graphshard.doctor` finds in a model: all that `compile` handles specially, leaves to eager code, or refuses.

A check that `compile` makes, too, is shared with it. A forward is looked at on a copy whose tensors have no data: the
model stays as it is, nothing is sent. Imports `api` and what is below it.
"""

from graphshard.examining.diagnosis import Diagnosis, Finding
from graphshard.examining.doctor import doctor

__all__ = ["Diagnosis", "Finding", "doctor"]
