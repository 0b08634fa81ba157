"""What has to be set before a test process imports anything else."""

import os
import sys
from pathlib import Path

# Without bytecode each test process, and each program that a test starts, would compile all that it imports.
if sys.dont_write_bytecode:
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Threads of a PyTorch that has a tiny model to run mostly wait for one another: three times slower alone, and
# twenty times where other test processes need the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
