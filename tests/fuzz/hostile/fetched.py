"""Hostile streams of a keeper, as `dlion fetch` unpacks them.

The result must be a documented error without a change, or plain files. There is nothing outside the
folder, no link, and nothing left of a refused stream.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_cli.inputs.unpacking import unpack
from dlion_worker.artifact_server.pack import CHECKSUMS, CONTENTS, pack
from hostile import bending

FILES = {"models/plant-a/model.keras": bytes(range(256)) * 8, "models/plant-a/model.json": b"{}"}
NAMES = ("../up", "/tmp/up", "a/../../up", "a//b", "./a", "", ".", "..", "a" * 300,
         "a/" * 200 + "b", "\udcff", "\n", CONTENTS, CHECKSUMS, "models", "models/plant-a",
         *FILES)  # fmt: skip
TYPES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE,
         tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, b"?")  # fmt: skip


@functools.cache
def valid_stream() -> bytes:
    """The stream of a keeper for a site's model."""
    output = io.BytesIO()
    with tempfile.TemporaryDirectory() as root:
        for name, content in FILES.items():
            path = Path(root) / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        pack(Path(root), "1", ["models"], output)
    return output.getvalue()


def _made(rng: random.Random) -> bytes:
    """A stream with valid checksums in which only one member is altered."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    documents: dict[str, Any] = {
        CONTENTS: {"run": "1", "files": {name: len(FILES[name]) for name in FILES}},
        CHECKSUMS: {"sha256": sums},
    }
    if rng.random() < 0.5:
        which = rng.choice((CONTENTS, CHECKSUMS))
        documents[which] = bending.value_of(rng, documents[which])
    contents = {name: json.dumps(each).encode() for name, each in documents.items()}
    members = [(CONTENTS, contents[CONTENTS]), *FILES.items(), (CHECKSUMS, contents[CHECKSUMS])]
    altered, output = rng.randrange(len(members)), io.BytesIO()
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for number, (name, content) in enumerate(members):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            if number == altered:
                _alter(rng, entry)
            archive.addfile(entry, io.BytesIO(content))
    return output.getvalue()


def _alter(rng: random.Random, entry: tarfile.TarInfo) -> None:
    match rng.randrange(4):
        case 0:
            entry.name = rng.choice(NAMES)
        case 1:
            entry.type, entry.linkname = rng.choice(TYPES), rng.choice(NAMES)
        case 2:
            entry.mtime = rng.choice((-1, 2**31, 2**40, 2**62, 2**63, 1e300))
        case _:
            entry.pax_headers = {rng.choice(("path", "size", "mtime", "linkpath", "x")): str(
                rng.choice((*NAMES[:6], "-1", "1e999", "nan", "9" * 30)))}  # fmt: skip


def attack_fetched(rng: random.Random, folder: Path) -> str | None:
    """Unpack one hostile stream into a folder that has a file of the same name."""
    valid = valid_stream()
    if rng.random() < 0.5:
        stream = bending.until_different(valid, lambda: bending.bytes_of(rng, valid))
    else:
        stream = _made(rng)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        out = Path(made) / "out"
        before = out / "models" / "plant-a" / "model.json"
        before.parent.mkdir(parents=True)
        before.write_text("before")
        try:
            unpack([stream], out)
            word = "taken"
        except (ContractError, UnavailableError, DataError, OSError):  # a name that is too long
            word = "refused"
        there = {path for path in Path(made).rglob("*") if path.is_symlink() or not path.is_dir()}
        assert all(path.is_file() and not path.is_symlink() for path in there)
        assert all(path.is_relative_to(out) for path in there)
        if word == "refused":
            assert there == {before}
            assert before.read_text() == "before"
    return word
