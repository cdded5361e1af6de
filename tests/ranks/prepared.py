"""What every rank imports and sets up. starting.py forks the ranks from a process that has imported
this, so that it is done once for all of them.
"""

import torch

from .. import interpreter, quick_pytorch, traced
from ..eager_kernels import eager_kernels

torch.set_num_threads(1)  # nor is there a pool of threads that a fork would lose
interpreter.hasten()
quick_pytorch.hasten()
traced.trace()
with torch.no_grad(), eager_kernels():  # Inductor traces patterns of its own
    torch.compile(torch.sin)(torch.ones(8))
torch.compiler.reset()

from ..oracle import jobs  # noqa: E402, F401
from . import all_reduces, decisions, trainings  # noqa: E402, F401
