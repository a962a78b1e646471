"""Lua 5.1 with the libraries that GitOps tools give to the scripts of their users.

Argo CD opens `base`, `table`, `package` and an `os` that has the time. Karmada opens `string` and
`math` as well, without some of `base`. This runtime opens a subset of both. Source: argo-cd
util/lua/lua.go; karmada pkg/resourceinterpreter/customized/declarative/luavm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type

_KEPT = ("_G", "_VERSION", "assert", "error", "ipairs", "next", "pairs", "pcall", "select", "table",
         "tonumber", "tostring", "type", "unpack", "xpcall")  # fmt: skip
_SHUT = """
debug.setmetatable("", nil)  -- else ("x"):upper() finds the library `string`
local kept = ...
for name in pairs(_G) do
  if not kept[name] then _G[name] = nil end
end
"""


def _runtime() -> Any:
    lua = LuaRuntime(register_eval=False, register_builtins=False, unpack_returned_tuples=True)
    lua.execute(_SHUT, lua.table_from(dict.fromkeys(_KEPT, True)))
    return lua


def argo_cd_health(script: str, document: Mapping[str, Any]) -> dict[str, str]:
    """Return the result of Argo CD's health script for an object: `status` and `message`."""
    lua = _runtime()
    lua.globals().obj = lua.table_from(document, recursive=True)
    return dict(lua.execute(script).items())


def call(script: str, function: str, document: Mapping[str, Any]) -> Any:
    """Return the result of a function of Karmada's script for an object; tables as dicts or
    lists."""
    lua = _runtime()
    lua.execute(script)
    return _plain(lua.globals()[function](lua.table_from(document, recursive=True)))


def _plain(value: Any) -> Any:
    if lua_type(value) != "table":
        return value
    items = {key: _plain(each) for key, each in value.items()}
    return list(items.values()) if list(items) == list(range(1, len(items) + 1)) else items
