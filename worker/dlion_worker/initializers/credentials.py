"""Credentials of a download, from variables: in a pod those of its Secret, else the user's."""

import base64
import re
from collections.abc import Mapping

from dlion_api.cluster_names import DOWNLOAD_CREDENTIALS
from dlion_api.errors import DataError, UnavailableError
from dlion_api.spec.initializers import Download


def local_variables(secret_name: str) -> Mapping[str, str]:
    """Return the variables that stand for a Secret outside of a cluster, by its keys.

    Each Secret has its own, so that no server gets what is meant for another one.

    >>> local_variables("my-hub")["token"]
    'DLION_DOWNLOAD_TOKEN_MY_HUB'
    """
    suffix = re.sub("[-.]", "_", secret_name).upper()
    return {key: f"{variable}_{suffix}" for key, variable in DOWNLOAD_CREDENTIALS.items()}


def authorization(
    download: Download, environment: Mapping[str, str], variables: Mapping[str, str]
) -> str:
    """Return the value of the Authorization header; empty: the download names no Secret.

    `variables` are keyed by the Secret's keys. Raises: UnavailableError if none of them is set, as
    the Secret may come later; DataError, without the token, if it cannot stand in a header.
    """
    if not download.secret_name:
        return ""
    # A Secret that was made from files has the newlines at their ends.
    given = {key: environment.get(name, "").rstrip("\r\n") for key, name in variables.items()}
    if token := given["token"].strip():
        if re.fullmatch("[!-~]+", token) is None:
            raise DataError(
                f"Secret {download.secret_name}: token must be one line of visible ASCII "
                "characters without spaces. Correct it"
            )
        return f"Bearer {token}"
    if given["username"] or given["password"]:
        both = f"{given['username']}:{given['password']}"
        # As the bytes of the variables, whatever their encoding.
        return f"Basic {base64.b64encode(both.encode(errors='surrogateescape')).decode()}"
    local = local_variables(download.secret_name)
    raise UnavailableError(
        f"{download.file_name}: no credentials of Secret {download.secret_name}. Create it with "
        "the key token, or username and password. Without a cluster, set "
        f"{local['token']}, or {local['username']} and {local['password']}"
    )


def s3_credentials(
    download: Download, environment: Mapping[str, str], variables: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the values of the Secret's keys; empty: not set.

    Raises: UnavailableError if the access key is missing; DataError, without the value, if one
    cannot stand in a request.
    """
    given = {key: environment.get(name, "").strip() for key, name in variables.items()}
    for key, value in given.items():
        if key.startswith("AWS_") and re.fullmatch("[!-~]*", value) is None:
            raise DataError(
                f"Secret {download.secret_name}: {key} must be one line of visible ASCII "
                "characters without spaces. Correct it"
            )
    if given["AWS_ACCESS_KEY_ID"] and given["AWS_SECRET_ACCESS_KEY"]:
        return given
    local = local_variables(download.secret_name)
    raise UnavailableError(
        f"{download.file_name}: no access key in Secret {download.secret_name}. Create it with "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Without a cluster, set "
        f"{local['AWS_ACCESS_KEY_ID']} and {local['AWS_SECRET_ACCESS_KEY']}"
    )
