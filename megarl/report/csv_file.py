"""RUN_DIR/metrics.csv and value_pretrain.csv: the same numbers as in the .jsonl files, for spreadsheets.

The first column is `iteration`; a metric that an iteration does not have is an empty cell.
"""

import csv
from pathlib import Path

from megarl.report.metrics import FILE_NAME, ITERATION, PRETRAINING_FILE_NAME, load_metrics
from megarl.types import Metrics


class CsvTable:
    """One .csv beside its .jsonl, to which each line is written before `append` is called for it."""

    def __init__(self, source: Path):
        self._source, self.path = source, source.with_suffix(".csv")
        self._columns: list[str] = []
        """Empty: the file is not that of the source"""

    def append(self, iteration: int, metrics: Metrics) -> None:
        """Append the source's last line, or write the whole table anew where it has a metric that had no column."""
        if not metrics.keys() <= set(self._columns):
            self._rewrite()
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow({ITERATION: iteration, **metrics})

    def forget(self) -> None:
        """The source has been cut: the next line makes the table anew."""
        self._columns = []

    def _rewrite(self) -> None:
        lines = load_metrics(self._source)
        self._columns = [ITERATION, *sorted({name for line in lines for name in line} - {ITERATION})]
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(lines)
        partial.replace(self.path)


class CsvSink:
    def __init__(self, run_dir: Path):
        self._metrics, self._pretraining = CsvTable(run_dir / FILE_NAME), CsvTable(run_dir / PRETRAINING_FILE_NAME)

    def write(self, iteration: int, metrics: Metrics) -> None:
        self._metrics.append(iteration, metrics)

    def write_pretraining(self, step: int, metrics: Metrics) -> None:
        self._pretraining.append(step, metrics)

    def rewind(self, iteration: int) -> None:
        self._metrics.forget()
        self._pretraining.forget()

    def close(self) -> None:
        """Every line is complete on disk already."""
