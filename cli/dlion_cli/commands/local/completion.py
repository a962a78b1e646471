"""`dlion completion`: print the script with which a shell completes `dlion` commands."""

from typing import Final

import click
from click.shell_completion import get_completion_class

_VARIABLE: Final = "_DLION_COMPLETE"
"""The variable by which the script asks `dlion` for completions; click derives it from the name
`dlion`."""
_BASH: Final = """\
_dlion_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" words items item type value last
    local IFS=' '
    read -ra words <<< "$line"
    [[ $line == *' ' ]] && words+=("")
    last="${words[${#words[@]} - 1]}"
    [[ $last == --*=* ]] && last="${last#*=}"
    COMPREPLY=()
    mapfile -t items < <(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) \\
        _DLION_COMPLETE=bash_complete "$1")
    for item in "${items[@]}"; do
        IFS=',' read -r type value <<< "$item"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                [[ $value == *[.=] ]] && compopt -o nospace
                [[ $last == *=* ]] && value="${value#"${last%=*}="}"
                [[ $last == *:* && $COMP_WORDBREAKS == *:* ]] && value="${value#"${last%:*}:"}"
                COMPREPLY+=("$value") ;;
        esac
    done
}
complete -o nosort -F _dlion_completion dlion
"""
"""Unlike click's: for bash `=` and `:` end a word, and no space follows `.` and `=`."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and values of `dlion`.

    Bash needs version 4.4. In the present shell:

    \b
      source <(dlion completion bash)     # or zsh
      dlion completion fish | source
    In every new one:
      dlion completion bash > ~/.local/share/bash-completion/completions/dlion
      dlion completion zsh > "${fpath[1]}/_dlion"
      dlion completion fish > ~/.config/fish/completions/dlion.fish
    """
    if shell == "bash":
        click.echo(_BASH, nl=False)
        return
    kind = get_completion_class(shell)
    assert kind is not None, shell
    click.echo(kind(ctx.find_root().command, {}, "dlion", _VARIABLE).source())
