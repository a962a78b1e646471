"""Finds and reads environment files: published ones by name, others by path.

The published files are beside this module, in `files/`, so that they are installed with DLion.
`environments/` at the root of the repository links to that folder.
"""

from dataclasses import replace
from pathlib import Path

from dlion_api.document import parse
from dlion_api.errors import Problem, SpecError
from dlion_api.suggestions import did_you_mean
from dlion_environments.model import Environment
from dlion_environments.yaml_text import MAX_BYTES, parse_documents, single_document

FILES = Path(__file__).parent / "files"


def environment_names() -> list[str]:
    """Names of the published environments."""
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def load_environment(name_or_path: str | Path) -> Environment:
    """Load a published environment by name, or a file (with a `/` or ending in .yaml). Raises
    SpecError with every problem of the file, or the known names."""
    text = str(name_or_path)
    if "/" not in text and not text.lower().endswith((".yaml", ".yml")):
        known = environment_names()
        if text not in known:
            advice = "Give one of these names, or the path of a file."
            problem = Problem(
                path="environment",
                message="there is no environment of that name",
                value=text,
                allowed=", ".join(known),
                advice=f"{did_you_mean(text, known)} {advice}".lstrip(),
            )
            raise SpecError([problem])
        path, source = FILES / f"{text}.yaml", ""
    else:
        path, source = Path(name_or_path), text
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        problem = Problem(
            path="environment",
            message=f"the file cannot be read: {error.strerror}",
            value=str(path),
            advice=f"Give a readable file, or one of: {', '.join(environment_names())}.",
        )
        raise SpecError([problem]) from error
    document = single_document(parse_documents(data, source=text), source=text)
    environment = parse(Environment, document.value, source=text, lines=document.lines)
    return replace(environment, lines=document.lines, file=source)
