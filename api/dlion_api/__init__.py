"""DLion's public contract: everything that crosses a process boundary.

Contents: the manifest's model, status and conditions, membership, measurement records, names, exit
codes, errors, and the generated protobuf (`wire`). No behaviour: anything that does I/O, depends on
Kubernetes, TensorFlow or gRPC, or is used by one process only belongs elsewhere.

Used by the operator, the worker and the command line; imports the standard library only.
"""

from typing import Final

VERSION: Final = "0.1.0"
"""The version of DLion, as in `pyproject.toml`: images have no package metadata."""
