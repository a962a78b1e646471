"""Random documents: changed valid manifests, and arbitrary values."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from dlion_api.spec import load_job
from manifest_table import ACCEPTED

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.integers(-2, 20)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.floats(-1, 2)
    | st.text(max_size=5)
    | st.sampled_from(["digits", "plant-a", "a" * 40, "bySite", "1Gi", "-a", "a\n", "Secret"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of a value and of everything in it."""
    steps: list[str | int] = []
    if isinstance(value, dict | list):
        steps = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [path, *(place for step in steps for place in places(value[step], (*path, step)))]


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@st.composite
def changed_documents(draw: st.DrawFn) -> Any:
    """A full valid manifest with one to three random changes below `spec`."""
    case = draw(st.sampled_from(ACCEPTED))
    document = copy.deepcopy(load_job(case.document).to_document())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document["spec"], ("spec",))))
        parent, last = _at(document, path[:-1]), path[-1]
        kind = draw(st.sampled_from(["replace", "remove", "add", "repeat", "similar"]))
        here = parent[last]
        if kind == "remove" and len(path) > 1:
            del parent[last]
        elif kind == "add" and isinstance(here, dict):
            here[draw(st.text(max_size=8))] = draw(values)
        elif kind == "repeat" and isinstance(here, list) and here:
            here.append(copy.deepcopy(here[0]))
        elif kind == "similar" and isinstance(here, str):
            parent[last] = here + draw(st.text(max_size=2))
        else:
            parent[last] = draw(values)
    return document
