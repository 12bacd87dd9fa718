"""TensorBoard event files under RUN_DIR/tensorboard; the step is the iteration."""

import time
from pathlib import Path
from types import ModuleType

from megarl.types import Metrics

DIRECTORY = "tensorboard"


class TensorBoardWriter:
    """Writes each metric as a scalar of its own name; flushed after every iteration."""

    def __init__(self, directory: Path):
        """Raises RuntimeError where the tensorboard package is missing."""
        self._directory = directory
        self._writer = load_tensorboard().SummaryWriter(log_dir=str(directory))
        self._opened = int(time.time())

    def write(self, iteration: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=iteration)
        self._writer.flush()

    def rewind(self, iteration: int) -> None:
        """Hide what was written for this iteration and later ones."""
        self._writer.close()
        # Files are read in the order of their names, which begin with the second in which they were made.
        time.sleep(max(0.0, self._opened + 1 - time.time()))
        self._writer = load_tensorboard().SummaryWriter(log_dir=str(self._directory), purge_step=iteration)
        self._opened = int(time.time())

    def close(self) -> None:
        self._writer.close()


def load_tensorboard() -> ModuleType:
    """torch.utils.tensorboard, imported only when it is used: it takes a second or more."""
    try:
        from torch.utils import tensorboard
    except ImportError as error:
        raise RuntimeError(
            f"logger.tensorboard=true needs the package tensorboard ({error}); "
            "install it (make install) or set logger.tensorboard=false"
        ) from error
    return tensorboard
