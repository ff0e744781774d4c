"""Translation validation: the graph before and after a pass, run on the same inputs in a world of ranks that are all in
this process.

No process group is asked for anything but the ranks that it has. Source: Pnueli, Siegel and Singerman, "Translation
Validation" (1998), by execution in place of proof.
"""

from graphshard.validation.check import Before as Before
