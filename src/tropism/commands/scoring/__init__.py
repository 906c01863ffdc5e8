"""`tropism evaluate` and `tropism score`: score held-out rows with a model, without training.

scores.py scores the rows with a model and, if there is one, a reference; figures.py makes the metrics of `evaluate`
from the scores; comparison.py compares several models; records.py makes and writes the rows of `score`.
"""

from tropism.commands.scoring.comparison import Comparison, compare, show
from tropism.commands.scoring.figures import figures
from tropism.commands.scoring.records import original_columns, records, write
from tropism.commands.scoring.scores import Scores, score

__all__ = ["Comparison", "Scores", "compare", "figures", "original_columns", "records", "score", "show", "write"]
