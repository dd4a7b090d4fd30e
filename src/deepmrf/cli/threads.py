"""How the command's threads wait: asleep. To be imported before PyTorch, which reads it when it is loaded.

OpenMP's threads spin while they wait for one another: a little faster on an idle machine, up to twenty times slower on
one where something else wants the cores, too.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
