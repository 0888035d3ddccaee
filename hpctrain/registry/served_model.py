"""A trained model as MLflow loads and serves it: the task's own code, and weights that are numbers only, no pickle.

MLflow runs this file when the model is loaded; the class below is then what ``mlflow.pyfunc`` and ``mlflow models
serve`` talk to.
"""

from __future__ import annotations

from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow.models import set_model


class ServedModel(mlflow.pyfunc.PythonModel):
    """Outputs for inputs of the task's field names."""

    framework: Any
    fields: Any

    def load_context(self, context: Any) -> None:
        """Makes the model as the run file says, and gives it the saved weights."""
        from hpctrain.config.loading import load
        from hpctrain.rank.trial import with_weights

        self.framework, problem = with_weights(load(context.artifacts["run_file"]), context.artifacts["weights"])
        self.fields = problem.train.fields

    def predict(self, context: Any, model_input: Any, params: Any = None) -> dict[str, Any]:
        """Arrays by output name.

        Args:
            context: MLflow's.
            model_input: arrays by field name with a leading sample axis; or one array, for the first field.
            params: not used.
        """
        given = model_input if isinstance(model_input, dict) else {next(iter(self.fields)): model_input}
        batch = {name: np.ascontiguousarray(values, dtype=self.fields[name].dtype) for name, values in given.items()}
        return dict(self.framework.predict(batch))


set_model(ServedModel())
