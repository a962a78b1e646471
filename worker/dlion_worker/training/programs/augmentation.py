"""A program's `augment(x, y)`, compiled so that its random numbers follow a seed.

TensorFlow's random operations draw from generators that no checkpoint can hold. So the traced graph
gets the stateless operation in place of each one: the same numbers for the same seed, on every
machine. `BatchStream` calls it with a seed of its position, so a resumed worker continues with the
batches that it would have had.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ProgramError
from dlion_worker.training.building import specs, tensors
from dlion_worker.training.framework import tf
from dlion_worker.training.programs.program import TrainingProgram, user_code

_STATELESS = {
    "RandomUniform": ("StatelessRandomUniform", 1),
    "RandomUniformInt": ("StatelessRandomUniformInt", 1),
    "RandomStandardNormal": ("StatelessRandomNormal", 1),
    "TruncatedNormal": ("StatelessTruncatedNormal", 1),
    "Multinomial": ("StatelessMultinomial", 2),
}
"""For each operation the one with a seed, and the place of the seed among its inputs."""
_SEED = "dlion_seed_"

_ADVICE = "It takes tensors of one batch and returns (x, y) of the same shapes and types"


class Augmentation:
    """`augment` of one program, for batches of one kind. Not thread-safe before its first call."""

    def __init__(self, program: TrainingProgram) -> None:
        self._program = program
        self._compiled: Any = None

    def __call__(
        self, x_B: NDArray[Any], y_B: NDArray[Any], seed: Sequence[int]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The changed batch, of the same shapes and types. Raises: ProgramError."""
        given = tensors(x_B), tensors(y_B)
        state = np.random.SeedSequence([*seed]).generate_state(2).view(np.int32)
        with user_code(self._program, "augment(x, y)", _ADVICE):
            if self._compiled is None:
                self._compiled = _compiled(self._program, specs(x_B), specs(y_B))
            x, y = self._compiled(*given, tf.constant(state))
        return self._like(x, x_B, "x"), self._like(y, y_B, "y")

    def _like(self, found: Any, given_B: NDArray[Any], name: str) -> NDArray[Any]:
        """The tensors as an array like the given one."""
        names = given_B.dtype.names
        if names is not None:
            result = np.empty_like(given_B)
            for each in names:
                result[each] = self._like(found[each], given_B[each], f"{name}[{each!r}]")
            return result
        array = np.asarray(found)
        if array.shape != given_B.shape or array.dtype != given_B.dtype:
            raise ProgramError(
                f"program {self._program.name}: augment(x, y) returns another {name} (given: "
                f"{array.dtype} {list(array.shape)}; allowed: {given_B.dtype} "
                f"{list(given_B.shape)}). Use tf.cast, or resize in the model"
            )
        return array


@lru_cache(maxsize=1)
def augmentation_of(program: TrainingProgram) -> Augmentation | None:
    """The program's, which all workers of this process share; None if it has none."""
    return None if program.augment is None else Augmentation(program)


def _compiled(program: TrainingProgram, x_spec: Any, y_spec: Any) -> Any:
    """A function of x, y and a seed [2], int32. Raises: ProgramError."""
    traced = tf.function(program.augment).get_concrete_function(x_spec, y_spec)
    outputs = traced.structured_outputs
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    if not is_pair or [*map(_names, outputs)] != [_names(x_spec), _names(y_spec)]:
        raise ProgramError(
            f"program {program.name}: augment(x, y) must return (x, y), as load_data (given: "
            f"{outputs})"
        )
    if traced.variables:
        raise ProgramError(
            f"program {program.name}: augment(x, y) uses the variable {traced.variables[0].name}, "
            "which no checkpoint has. Put layers with random numbers or weights into the model, "
            "and use functions of tf.image and tf.random here"
        )
    graph_def = traced.graph.as_graph_def()
    _refuse_others(program, graph_def)
    count = _make_stateless(graph_def)
    own, captured = traced.inputs, traced.captured_inputs

    def seeded(x: Any, y: Any, seed: Any) -> Any:
        values = [*tf.nest.flatten((x, y)), *map(tf.identity, captured)]
        replaced = dict(zip((each.name for each in own), values, strict=True))
        replaced |= {f"{_SEED}{number}:0": tf.add(seed, [number, 0]) for number in range(count)}
        wanted = [each.name for each in tf.nest.flatten(outputs)]
        found = tf.graph_util.import_graph_def(
            graph_def, input_map=replaced, return_elements=wanted
        )
        return tf.nest.pack_sequence_as(outputs, found)

    seed_spec = tf.TensorSpec([2], tf.int32)
    return tf.function(seeded, autograph=False).get_concrete_function(x_spec, y_spec, seed_spec)


def _names(part: Any) -> list[str] | None:
    """Names of several inputs or targets; None: it is a single one."""
    return sorted(part) if isinstance(part, dict) else None


def _make_stateless(graph_def: Any) -> int:
    """Replace the random operations; return how many seeds the graph takes now."""
    count = 0
    for node in [each for each in graph_def.node if each.op in _STATELESS]:
        node.op, place = _STATELESS[node.op]
        node.input.insert(place, f"{_SEED}{count}")
        for name in ("seed", "seed2"):
            node.attr.pop(name, None)
        if "Tout" in node.attr:
            node.attr["dtype"].CopyFrom(node.attr.pop("Tout"))
        node.attr["Tseed"].type = tf.int32.as_datatype_enum
        placeholder = graph_def.node.add(name=f"{_SEED}{count}", op="Placeholder")
        placeholder.attr["dtype"].type = tf.int32.as_datatype_enum
        count += 1
    return count


def _refuse_others(program: TrainingProgram, graph_def: Any) -> None:
    """Raises: ProgramError for what no seed reaches."""
    inner = [node for function in graph_def.library.function for node in function.node_def]
    for node in [each for each in graph_def.node if each.op not in _STATELESS] + inner:
        op = node.op
        if op in ("PyFunc", "EagerPyFunc", "PyFuncStateless"):
            advice = "Use operations of TensorFlow, as a function of Python has no seed"
        elif op in _STATELESS:
            advice = (
                "Draw the numbers before the tf.cond, tf.map_fn or loop, or use tf.vectorized_map "
                "for single samples"
            )
        # All operations that draw from a generator of TensorFlow's own have the second attribute,
        # also those without Random in their name.
        elif ("Random" in op and not op.startswith("Stateless")) or "seed2" in node.attr:
            advice = "Use tf.random.uniform, normal or truncated_normal, which it can seed"
        else:
            continue
        raise ProgramError(
            f"program {program.name}: augment(x, y) contains {op}, whose numbers would differ "
            f"after a restart. {advice}"
        )
