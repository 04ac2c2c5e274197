"""What stands in for a running engine lies beside the tests of the package, which use it too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
