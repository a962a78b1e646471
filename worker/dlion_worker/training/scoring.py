"""The loss to minimise, and what is reported as accuracy.

Labels are class numbers (int32). Targets are what else the program's `load_data` returns: floats,
or a dict of arrays for several outputs. Shape suffixes: B batch, C classes.
"""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ProgramError
from dlion_api.status_names import R_SQUARED
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_worker.training.building import BuiltModel
from dlion_worker.training.framework import tf
from dlion_worker.training.programs.compiled import CompiledMetrics
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.programs.shape_mismatch import loss_mismatch, sample_shapes

Sums = tuple[NDArray[Any], ...]
"""What the evaluations of batches add up to."""

_ROUNDING = 1e-6
_FACTORS = (10.0, -10.0, 1000.0, -1000.0)
"""Factors of the weights: with one of them logits leave 0..1, while probabilities do not."""
_WHOLE = 0.02
"""Deviation from 1 of probabilities' sum, as bfloat16 rounds them."""
_STACK = re.compile(
    r"^(Detected at .*|<stack traces unavailable>|  File .*(\n    .*)*)$", re.MULTILINE
)
"""TensorFlow's lines about where an operation was defined."""


class Scoring:
    """The program's loss and accuracy, those of `compile()`, or the defaults for its data."""

    def __init__(
        self,
        program: TrainingProgram,
        built: BuiltModel,
        class_count: int,
        target_shape: Sequence[int] | None,
        metrics: CompiledMetrics,
    ) -> None:
        """`class_count`: 0 if the data have targets of `target_shape` (None: several).

        `metrics`: of `compile()`.

        Raises: ProgramError if they do not fit together.
        """
        self._program = program
        self._class_count = class_count
        self._is_binary = False
        """Whether one output stands for classes 0 and 1."""
        self._has_logits = False
        """Whether Keras keeps logits with the outputs."""
        self.metrics = metrics
        self._outputs = outputs = built.outputs
        self._compiled_accuracy = "" if program.accuracy is not None else metrics.accuracy
        """Name of the metric that is the accuracy, if one is."""
        self._adds_up = program.accuracy is not None or not metrics.accuracy
        """Whether `sums` has the accuracy. Keras' own count of labels has no classes."""
        if metrics.counts_labels and class_count and tf.is_tensor(outputs):
            shape = tuple(outputs.shape[1:])
            self._adds_up = bool(shape) and shape[:-1] == target_shape and shape[-1] >= class_count
        if program.loss is None or (program.accuracy is None and not metrics.accuracy):
            self._check(built, target_shape)

    def mean_loss(self, y_B: Any, outputs: Any) -> Any:
        """The batch's mean loss, a scalar tensor."""
        if self._program.loss is not None:
            advice = "It takes and yields tensors"
            mismatch = partial(loss_mismatch, y_B, outputs)
            with user_code(self._program, self._program.loss_name, advice, mismatch):
                value = tf.convert_to_tensor(self._program.loss(y_B, outputs))
                return tf.reduce_mean(tf.cast(value, tf.float32))
        if not self._class_count:
            return tf.reduce_mean(tf.square(outputs - _like(outputs, y_B)))
        logits = self._logits(outputs)
        if self._is_binary:
            truth = tf.cast(y_B, tf.float32)
            entropy = tf.nn.sigmoid_cross_entropy_with_logits(truth, logits[..., 0])
        else:
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(y_B, logits)
        return tf.reduce_mean(entropy)

    def sums(self, y_B: Any, outputs: Any, count: Any) -> Any:
        """Tensors that add up over batches to what `result` takes. `count`: samples of this one.

        None of them if a metric of `compile()` is the accuracy.
        """
        if not self._adds_up:
            return ()
        if self._program.accuracy is not None:
            advice = "It takes tensors and returns a value from 0 to 1, or one for each sample"
            mismatch = partial(loss_mismatch, y_B, outputs)
            with user_code(self._program, "accuracy(y_true, y_pred)", advice, mismatch):
                value = tf.convert_to_tensor(self._program.accuracy(y_B, outputs))
            mean = tf.reduce_mean(tf.cast(value, tf.float64))
            counted = tf.where(tf.math.is_finite(mean), tf.cast(count, tf.float64), 0.0)
            return tf.math.multiply_no_nan(mean, counted), counted
        if not self._class_count:
            targets = tf.cast(_like(outputs, y_B), tf.float64)
            error = tf.cast(outputs, tf.float64) - targets
            return tuple(
                tf.reduce_sum(each, axis=0) for each in (tf.square(error), targets, targets**2)
            )
        logits = self._logits(outputs)
        if self._is_binary:
            found = tf.cast(logits[..., 0] > 0, tf.int32)
        else:
            found = tf.argmax(logits, -1, output_type=tf.int32)
        correct = tf.cast(tf.equal(found, y_B), tf.int32)
        labels = tf.reshape(y_B, [-1])
        return tuple(
            tf.math.unsorted_segment_sum(each, labels, self._class_count)
            for each in (tf.reshape(correct, [-1]), tf.ones_like(labels))
        )

    def result(
        self, sums: Sums, loss: float, samples: int, metrics: Sequence[Any]
    ) -> EvaluationResult:
        """The evaluation of that many samples. `metrics`: the state of `self.metrics`."""
        classes: tuple[float, ...] = ()
        figures = dict(self.metrics.result(metrics))
        compiled = figures.pop(self._compiled_accuracy, 0.0)
        if not self._adds_up:
            accuracy = compiled
        elif self._program.accuracy is not None:
            total, counted = map(float, sums)
            accuracy = total / counted if counted else 0.0
            if not -_ROUNDING <= accuracy <= 1 + _ROUNDING:
                raise ProgramError(
                    f"program {self._program.name}: accuracy(y_true, y_pred) must be from 0 to 1 "
                    f"(given: {accuracy:g}, the mean over {samples} samples)"
                )
        elif not self._class_count:
            squared_errors, totals, squares = sums
            spread = float(np.sum(squares - np.square(totals) / max(1, samples)))
            accuracy = max(0.0, 1.0 - float(np.sum(squared_errors)) / spread) if spread > 0 else 0.0
        else:
            correct_C, total_C = sums
            accuracy = float(correct_C.sum() / max(1, total_C.sum()))
            classes = tuple(float(a) for a in correct_C / np.maximum(1, total_C))
        own = bool(self._compiled_accuracy) or self._program.accuracy is not None
        name = "" if own or self._class_count else R_SQUARED
        return EvaluationResult(accuracy, loss, classes, samples, figures, name)

    def rejection(self, y_B: NDArray[Any], message: str) -> str:
        """Why TensorFlow rejects a batch, with its message last."""
        message = graph_error_cause(message)[:400]
        name, advice = self._program.name, "Check the data, the loss and the accuracy"
        if not self._class_count:
            return f"program {name}: TensorFlow rejected a batch: {message}. {advice}"
        least, most = int(y_B.min()), int(y_B.max())
        labels = f"labels from {least} to {most} ({self._class_count} classes)"
        last = self._outputs.shape[-1] if tf.is_tensor(self._outputs) else None
        if last is None or (least >= 0 and most < last):
            advice += ", and that labels count from 0"
            return f"program {name}: TensorFlow rejected a batch with {labels}: {message}. {advice}"
        return (
            f"program {name}: y has {labels}, and the model returns {sample_shapes(self._outputs)} "
            f"for one sample. Give the last layer at least {self._class_count} outputs, or correct "
            f"the labels: they count from 0. TensorFlow rejected a batch: {message}"
        )

    def _check(self, built: BuiltModel, target_shape: Sequence[int] | None) -> None:
        program, outputs = self._program, built.outputs
        if target_shape is None or not tf.is_tensor(outputs):
            raise ProgramError(
                f"program {program.name}: several outputs or targets need loss(y_true, y_pred) and "
                "accuracy(y_true, y_pred) in the program, or a loss and an accuracy in compile()"
            )
        shape = tuple(outputs.shape[1:])
        self._has_logits = has_logits = hasattr(outputs, "_keras_logits")
        self._is_binary = shape == (*target_shape, 1) and self._class_count == 2
        if not self._class_count:
            fits = _without_ones(shape) == _without_ones(target_shape)
            allowed = f"{list(target_shape)}, as the targets. If y are class numbers, return "
            allowed += "integers; for other targets, give the program loss and accuracy"
        else:
            fits = len(shape) == len(target_shape) + 1
            fits = fits and (self._is_binary or shape[-1] >= self._class_count)
            allowed = f"{[*target_shape, self._class_count]}, a logit or probability for each of "
            allowed += f"{self._class_count} classes. "
            allowed += (
                "Give the last layer more outputs, or correct the labels: they count from 0"
                if len(shape) == len(target_shape) + 1
                else "Turn one-hot rows into numbers with argmax"
            )
        if not fits:
            raise ProgramError(
                f"program {program.name}: the model's output has the wrong shape (given: "
                f"{list(shape)} for one sample; allowed: {allowed})"
            )
        if not self._class_count and has_logits and program.loss is None:
            raise ProgramError(
                f"program {program.name}: the model ends in probabilities, and y are floats. "
                "Return class numbers as integers, or give the program a loss"
            )
        if self._class_count and not has_logits and self._are_probabilities(built):
            raise ProgramError(
                f"program {program.name}: the model's outputs seem to be probabilities, and what "
                "makes them is not its last operation. Put the softmax or sigmoid last, return "
                "logits, or give the program loss and accuracy"
            )

    def _logits(self, outputs: Any) -> Any:
        """The logits that Keras made probabilities from, else the outputs."""
        logits = getattr(outputs, "_keras_logits", None)
        if logits is None and self._has_logits:
            raise ProgramError(
                f"program {self._program.name}: what follows the model's softmax or sigmoid "
                "changes its outputs in training. Put the softmax or sigmoid last"
            )
        return outputs if logits is None else logits

    def _are_probabilities(self, built: BuiltModel) -> bool:
        """Whether the outputs look like probabilities, and still do with much larger weights."""
        larger = map(built.outputs_with_weights, _FACTORS)
        return all(
            _may_be_probabilities(each, is_binary=self._is_binary)
            for each in itertools.chain([built.outputs], larger)
        )


def _may_be_probabilities(outputs: Any, *, is_binary: bool) -> bool:
    if not bool(tf.reduce_all(tf.math.is_finite(outputs))):
        return True  # too large to say
    is_within = bool(tf.reduce_all((outputs >= 0) & (outputs <= 1)))
    if not is_within or not bool(tf.reduce_any(outputs > 0)):
        return False
    return is_binary or bool(tf.reduce_all(tf.abs(tf.reduce_sum(outputs, axis=-1) - 1) < _WHOLE))


def _like(outputs: Any, y_B: Any) -> Any:
    """Targets in the outputs' shape: [B] would be broadcast against [B, 1]."""
    return tf.reshape(y_B, tf.shape(outputs))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def graph_error_cause(message: str) -> str:
    """The message of an error in a graph without the stack, which TensorFlow puts before the
    cause."""
    head, _, rest = message.partition("\n\n")
    if head != "Graph execution error:":
        return message
    cause = [line for line in _STACK.sub("", rest).splitlines() if line.strip()]
    return "\n".join(cause) or message
