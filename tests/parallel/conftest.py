import sys
from pathlib import Path

for room in ("mcore", "algo"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / room))
