"""What a model was compiled with, where the program has no function for it.

The loss and the optimizer become the program's. The metrics are computed over the held-out samples
by Keras' own code, with their state outside, so that evaluations may run in several threads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dlion_api.errors import ProgramError
from dlion_api.protocol.progress import MAX_METRICS
from dlion_api.spec import Optimizer
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.programs.shape_mismatch import loss_mismatch

_ACCURACIES = tuple(
    getattr(keras.metrics, name)
    for name in (
        "Accuracy", "BinaryAccuracy", "CategoricalAccuracy", "SparseCategoricalAccuracy",
        "TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy",
    )
)  # fmt: skip
"""Metrics from 0 to 1 that are larger for a better model."""

_OWN_STEPS = ("train_step", "compute_loss", "test_step", "compute_metrics")
"""Methods that `fit` calls and DLion does not."""

_MAX_NAME = 100
"""Characters of a metric's name: the names of all fit into a record."""

_ADVICE = "It is called as Keras' fit() calls it. Correct it, or give the program "


def with_compiled(program: TrainingProgram, model: Any) -> TrainingProgram:
    """The program with what its model was compiled with, where it has no function of its own.

    Raises: ProgramError where the model's class has training code that would not be called.
    """
    if program.loss is None:
        for name in _OWN_STEPS:
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise ProgramError(
                    f"program {program.name}: {type(model).__name__}.{name}() is never called, as "
                    "DLion has its own training loop. Write what it computes as loss(y_true, "
                    "y_pred) in the program"
                )
    if not model.compiled:
        return program
    if program.loss is None and model._compile_loss is not None:  # noqa: SLF001 - no public name
        program = replace(program, loss=_loss(model), loss_name="the loss of compile()")
    if program.optimizer is None and model.optimizer is not None:
        given = model.optimizer
        name = "the optimizer of compile()"
        program = replace(program, optimizer=lambda: given, optimizer_name=name)
    return program


def unused_optimizer(program: TrainingProgram, spec: Optimizer) -> str:
    """A note if the program has an optimizer and the manifest names another; else empty."""
    if program.optimizer is None or spec.name == "program":
        return ""
    given = program.optimizer_name
    return (
        f"{given} is not used, as trainer.optimizer.name is {spec.name} (learning rate "
        f"{spec.learning_rate:g}). To train with it, set trainer.optimizer.name to program"
    )


class CompiledMetrics:
    """The metrics of `compile()`; none if it was not called or has none.

    A state is a list of tensors, from `initial` on.
    """

    def __init__(self, program: TrainingProgram, model: Any, targets_B: Any, outputs: Any) -> None:
        """`targets_B` and `outputs`: of some samples; their values do not matter.

        Raises: ProgramError if loss or metrics do not fit them.
        """
        self._program, self._metrics = program, None
        self.initial: list[Any] = []
        self.accuracy = ""
        """Name of the first Keras accuracy, if there is one."""
        self.counts_labels = False
        """Whether that one is the share of labels that the largest output meets."""
        if not model.compiled:
            return
        mismatch = partial(loss_mismatch, targets_B, outputs)
        if program.loss_name != TrainingProgram.loss_name:
            advice = f"{_ADVICE}loss(y_true, y_pred)"
            with user_code(program, program.loss_name, advice, mismatch):
                model._compile_loss(targets_B, outputs)  # noqa: SLF001 - it creates its variables
        metrics = model._compile_metrics  # noqa: SLF001 - no public name
        if metrics is None:
            return
        with self._user_code(mismatch):
            metrics.update_state(targets_B, outputs)
            found = metrics.result()
            self._figures(found)
            metrics.reset_state()
        for name, metric in zip(found, metrics.metrics, strict=True):
            if not self.accuracy and isinstance(metric, _ACCURACIES):
                self.accuracy = name
                self.counts_labels = type(metric) is keras.metrics.SparseCategoricalAccuracy
        self._metrics = metrics
        self.initial = [tf.convert_to_tensor(each) for each in metrics.variables]

    def updated(self, state: Sequence[Any], targets_B: Any, outputs: Any) -> list[Any]:
        """The state after one more batch, of tensors."""
        if self._metrics is None:
            return []
        with self._user_code():
            return list(self._metrics.stateless_update_state([*state], targets_B, outputs))

    def result(self, state: Sequence[Any]) -> Mapping[str, float]:
        """The metrics by Keras' names for them; of one that returns a dict `<metric>/<key>`."""
        if self._metrics is None:
            return {}
        mapping = list(zip(self._metrics.variables, state, strict=True))
        with self._user_code(), keras.StatelessScope(state_mapping=mapping):
            # Results may be variables, whose values are of this scope alone.
            return self._figures(self._metrics.result())

    def _figures(self, found: Mapping[str, Any]) -> dict[str, float]:
        """One number by each name. Raises: ProgramError for what is not a number."""
        figures: dict[str, float] = {}
        for name, value in (part for each in found.items() for part in _parts(*each)):
            if len(name) > _MAX_NAME or name in figures or len(figures) == MAX_METRICS:
                raise ProgramError(
                    f"program {self._program.name}: the metrics of compile() need at most "
                    f"{MAX_METRICS} names of at most {_MAX_NAME} characters, each given once "
                    f"(given: {name[: _MAX_NAME + 1]!r} as number {len(figures) + 1}). Rename or "
                    "remove some"
                )
            figures[name] = self._number(name, value)
        return figures

    def _number(self, name: str, value: Any) -> float:
        try:
            tensor = keras.ops.convert_to_tensor(value)
            if len(found := tf.reshape(tensor, [-1])) == 1:
                return float(found[0])
            given = f"an array of shape {tuple(tensor.shape)}"
        except (TypeError, ValueError):
            given = f"a {type(value).__name__}"
        raise ProgramError(
            f"program {self._program.name}: metric {name} of compile() must return one number, or "
            f"a dict of numbers by name (given: {given}). Give it average='macro' if Keras has "
            "that for it, return a dict from its result(), or remove it"
        )

    def _user_code(self, mismatch: Callable[[], str] | None = None) -> Any:
        advice = f"{_ADVICE}accuracy"
        return user_code(self._program, "a metric of compile()", advice, mismatch)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value by its name; those of a dict, also of dicts in it, by `<name>/<key>`."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(f"{name}/{key}", part)
    else:
        yield name, value


def _loss(model: Any) -> Any:
    compiled = model._compile_loss  # noqa: SLF001 - no public name

    def loss(y_true: Any, y_pred: Any) -> Any:
        with keras.StatelessScope():  # it counts the loss of each output in variables
            return compiled(y_true, y_pred)

    return loss
