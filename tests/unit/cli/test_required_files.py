"""Test the message about a missing file.

It names the start of the file's path: the data root or a download. A watched folder has to exist,
and so have the held-out samples beside it.

Left out: all other paths of a job (test_comparison_runner.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlion_api.errors import DataError
from dlion_api.spec import load_job
from dlion_cli.inputs.required_files import require_data
from manifest_table import changed, smallest

DOWNLOAD = {"url": "https://example.com/d.zip", "sha256": "0" * 64}


@pytest.mark.parametrize("downloaded", [(), ("dataset",), ("dataset", "model")])
def test_the_advice_is_that_of_the_missing_paths(
    downloaded: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = load_job(changed(smallest(), {
        "spec.trainer.dataset": {"path": "data.npz", "format": "npz"},
        "spec.trainer.startFrom": "m.keras",
        **({"spec.trainer.initializer": dict.fromkeys(downloaded, DOWNLOAD)} if downloaded else {}),
    }))  # fmt: skip
    with pytest.raises(DataError) as caught:
        require_data([job], tmp_path)
    assert ("--data-root names" in str(caught.value)) == (len(downloaded) < 2)
    assert ("Paths in a download" in str(caught.value)) == bool(downloaded)


def test_a_watched_folder_and_its_held_out_samples_are_required(tmp_path: Path) -> None:
    dataset = {"path": "watched", "format": "npz", "evaluationPath": "held-out.npz", "watch": True}
    job = load_job(changed(smallest(), {"spec.trainer.dataset": dataset}))
    folder = tmp_path / "watched"
    with pytest.raises(DataError) as caught:
        require_data([job], tmp_path)
    assert f"trainer.dataset.path: no such file or directory: {folder}" in str(caught.value)
    assert "trainer.dataset.evaluationPath: no such file or directory" in str(caught.value)
    folder.mkdir()
    (tmp_path / "held-out.npz").touch()
    require_data([job], tmp_path)
