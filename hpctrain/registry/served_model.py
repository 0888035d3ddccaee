"""A trained model for MLflow to load and serve: the task's code, and weights without pickle.

MLflow runs this file when it loads the model; ``mlflow.pyfunc`` and ``mlflow models serve`` then use the class below.
"""

from __future__ import annotations

from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow.models import set_model


class ServedModel(mlflow.pyfunc.PythonModel):
    """Predicts from inputs named like the task's fields."""

    framework: Any
    fields: Any
    """The task's fields, what the model gets first."""

    def load_context(self, context: Any) -> None:
        """Builds the model from the run file and loads the saved weights."""
        from hpctrain.config.loading import load
        from hpctrain.rank.trial import with_weights

        self.framework, problem = with_weights(load(context.artifacts["run_file"]), context.artifacts["weights"])
        self.fields = {
            name: problem.train.fields[name] for name in [*problem.loading.recipe.names[:1], *problem.train.fields]
        }

    def predict(self, context: Any, model_input: Any, params: Any = None) -> dict[str, Any]:
        """Returns outputs as arrays by name.

        Args:
            context: MLflow's context.
            model_input: arrays by field name with a leading sample axis, or a single array for the first field.
            params: not used.
        """
        given = model_input if isinstance(model_input, dict) else {next(iter(self.fields)): model_input}
        batch = {name: np.ascontiguousarray(values, dtype=self.fields[name].dtype) for name, values in given.items()}
        return dict(self.framework.predict({name: batch[name] for name in self.fields if name in batch}))


set_model(ServedModel())
