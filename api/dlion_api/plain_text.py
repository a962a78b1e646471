"""Text without terminal escapes: Keras colours its errors, and tools their output.

Records, statuses and messages hold plain text. Code that shows it on a terminal replaces other
control characters.
"""

import re
from typing import Final

_ESCAPE: Final = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, positions
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[@-Z\\^_]"
    r")"
)


def without_escapes(text: str) -> str:
    """Return the text without terminal escapes (ECMA-48).

    >>> without_escapes("\x1b[1;31mno such layer\x1b[0m")
    'no such layer'
    """
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def error_text(error: BaseException) -> str:
    """Return the message of an error that other code has raised, as plain text."""
    try:
        text = str(error)
    except Exception as worse:  # noqa: BLE001 - its class is other code, too
        text = f"(its message raises {type(worse).__name__})"
    return without_escapes(text).strip()
