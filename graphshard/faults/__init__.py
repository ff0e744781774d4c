"""What happens when a rank hangs or dies: who waits where, for which parameters, and which ranks are missing.

`watched_run` notes what this rank does. `watchdog` notices that it stands still, `inquiry` asks the other ranks, and
`sentence` says what happened. Those that run programs tell of them here; imports `agree`, `reporting` and below.
"""

from graphshard.faults.deadlines import check_deadline, watch
from graphshard.faults.diagnose import diagnose
from graphshard.faults.watched_run import compiling, note_compiles, run_program

__all__ = ["check_deadline", "compiling", "diagnose", "note_compiles", "run_program", "watch"]
