"""Reads a finite `tf.data.Dataset` of (x, y) into NumPy arrays, once.

Called for what a program's `load_data` returns. `dataset` validates the arrays.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import tf
from dlion_worker.training.programs.program import TrainingProgram, user_code

MAX_BYTES = 2**31
"""Maximum size of one split in memory: a worker holds both splits, and a second copy while it
reads."""
MAX_SAMPLES = 20_000_000
_READ_TOGETHER = 256
"""Samples of a pipeline without batches that are read at once."""
WEIGHTS_ADVICE = (
    "Sample weights have no effect: make them an input or a target, and apply them in "
    "loss(y_true, y_pred)"
)

Arrays = NDArray[Any] | dict[str, NDArray[Any]]
_Name = tuple[str, str | None]
"""x or y, and the key if it is a dict."""


def is_pipeline(value: object) -> bool:
    """Whether this is a `tf.data.Dataset`."""
    return isinstance(value, tf.data.Dataset)


def seed_shuffles(seed: Sequence[int]) -> None:
    """Let pipelines that are made from now on shuffle in an order that depends on this only.

    A worker that is resumed then has its samples in the same order.
    """
    tf.random.set_seed(int(np.random.SeedSequence([*seed]).generate_state(1)[0]))


def read_pipeline(
    dataset: Any,
    program: TrainingProgram,
    call: str,
    *,
    max_bytes: int = MAX_BYTES,
    max_samples: int = MAX_SAMPLES,
) -> tuple[Arrays, Arrays]:
    """All samples, in the pipeline's order: x and y, each an array [N, ...] or a dict of them.

    `call` is what returned it, for messages. Raises: ProgramError if the pipeline fails, is not one
    of dense pairs, does not end, or has more than these samples or bytes.
    """
    what = f"program {program.name}: the tf.data pipeline of {call}"
    advice = (
        f"It is read into memory once (allowed: {max_samples:,} samples and "
        f"{max_bytes / 2**30:.3g} GiB). Remove .repeat(), take fewer samples with .take(n), or "
        "name files in trainer.dataset"
    )
    parts = _checked_parts(dataset.element_spec, what)
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ProgramError(f"{what} does not end. {advice}")
    min_bytes = max(0, count) * sum(map(_min_bytes, parts.values()))
    if count > max_samples or min_bytes > max_bytes:
        raise ProgramError(
            f"{what} is too large (given: {count:,} elements of at least {min_bytes:,} bytes). "
            f"{advice}"
        )
    if not _has_batches(parts, what):
        dataset = dataset.batch(_READ_TOGETHER)
    pieces: dict[_Name, list[NDArray[Any]]] = {name: [] for name in parts}
    samples = size = 0
    reading = f"reading the tf.data pipeline of {call}"
    with user_code(program, reading, "Bring all samples to one shape, and check its functions"):
        for batch in dataset.as_numpy_iterator():
            arrays = _named(batch)
            for name, value in arrays.items():
                pieces[name].append(value)
                size += value.nbytes
            samples += len(next(iter(arrays.values())))
            if size > max_bytes or samples > max_samples:
                raise ProgramError(
                    f"{what} is too large, or does not end (read: {samples:,} samples, {size:,} "
                    f"bytes). {advice}"
                )
        if not samples:
            raise ProgramError(f"{what} has no samples. Check the paths and filters in it")
        joined = {name: np.concatenate(pieces.pop(name)) for name in parts}
    return _unnamed(joined, "x"), _unnamed(joined, "y")


def _checked_parts(spec: Any, what: str) -> dict[_Name, Any]:
    """The specifications of x and y."""
    allowed = "(x, y), each a tensor or a dict of tensors"
    if isinstance(spec, tuple) and len(spec) == 3:
        raise ProgramError(f"{what} has three parts (allowed: {allowed}). {WEIGHTS_ADVICE}")
    parts = _named(spec) if isinstance(spec, tuple) and len(spec) == 2 else {}
    if not parts or any(isinstance(each, Iterable) for each in parts.values()):
        raise ProgramError(f"{what} has wrong elements (given: {spec}; allowed: {allowed})")
    for (letter, key), part in parts.items():
        name = letter if key is None else f"{letter}[{key!r}]"
        if not isinstance(part, tf.TensorSpec):
            kind = type(part).__name__.removesuffix("Spec")
            raise ProgramError(
                f"{what}: {name} is not dense (given: {kind}). Bring it to one shape with "
                "RaggedTensor.to_tensor() or tf.sparse.to_dense() in a .map()"
            )
        if part.dtype == tf.string:
            raise ProgramError(
                f"{what}: {name} is text. Turn it into numbers, for example with "
                "keras.layers.TextVectorization or StringLookup in a .map()"
            )
        if part.shape.rank is None:
            raise ProgramError(
                f"{what}: the shape of {name} is unknown. Give from_generator an output_signature, "
                "or call tf.ensure_shape in the .map()"
            )
    return parts


def _has_batches(parts: Mapping[_Name, Any], what: str) -> bool:
    """Whether the first axis of all parts is that of a batch.

    Raises: ProgramError where batches and samples look the same.
    """
    if any(part.shape.rank == 0 for part in parts.values()):
        return False
    lengths = {part.shape[0] for part in parts.values()}
    if len(lengths) > 1 or lengths == {None}:
        return lengths == {None}
    raise ProgramError(
        f"{what}: an element may be a batch or one sample (given: x and y have {lengths.pop()} "
        "rows each). Call .batch(n) last, without drop_remainder"
    )


def _min_bytes(part: Any) -> int:
    """Bytes of that part; an axis of unknown length counts as 1."""
    sizes = [1 if size is None else size for size in part.shape]
    return int(part.dtype.size * np.prod(sizes, dtype=np.int64))


def _named(pair: Any) -> dict[_Name, Any]:
    """The parts of x and y."""
    found: dict[_Name, Any] = {}
    for letter, part in zip(("x", "y"), pair, strict=True):
        given = part if isinstance(part, Mapping) else {None: part}
        found.update({(letter, key): each for key, each in given.items()})
    return found


def _unnamed(arrays: Mapping[_Name, NDArray[Any]], letter: str) -> Arrays:
    """The array or dict of arrays of that letter: the opposite of `_named`."""
    own = {key: each for (name, key), each in arrays.items() if name == letter}
    return own[None] if None in own else {str(key): each for key, each in own.items()}
