"""Opens object stores. The library retries requests with backoff and jitter."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from hpctrain.errors import requires

RETRIES = 6
"""Retries of a request to a store that is busy or does not answer."""
RETRY_S = 60.0
"""Longest time in seconds for retries; then the error reaches the caller."""
MOST_TEXT = 300
"""Most characters shown of a store's error."""


def opened(url: str, writes: bool = False) -> Any:
    """Returns the library's store for a URL. Raises MissingExtra."""
    with requires("obstore", "lake"):
        from obstore.store import from_url
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return from_url(url, mkdir=writes, automatic_cleanup=True)
    retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    if scheme not in ("s3", "s3a"):
        return from_url(url, retry_config=retries)
    provider: Any = None
    if "AWS_ACCESS_KEY_ID" not in os.environ and find_spec("boto3"):
        from obstore.auth.boto3 import Boto3CredentialProvider

        with suppress(ValueError):  # no credentials found
            provider = Boto3CredentialProvider()
    checked: Any = {"checksum_algorithm": "SHA256"}
    return from_url(url, config=checked, retry_config=retries, credential_provider=provider)


def shortened(error: Exception) -> str:
    """Shortens a store's error: drops the request and the library's internals."""
    text = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
    if found := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text):
        text = f"{found[1]}: {found[2].rstrip('.')}"
    return text.rpartition(" - ")[2][:MOST_TEXT]
