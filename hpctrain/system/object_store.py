"""Object stores. Requests are repeated, with backoff and jitter, by the library that makes them."""

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
"""Of a request to a store that is busy or does not answer, within ..."""
PATIENCE_S = 60.0
"""... this; then whoever asks has to decide."""
MOST_TEXT = 300
"""Characters of an error of the store that people see."""


def opened(url: str, writes: bool = False) -> Any:
    """The library's store for a URL. Raises MissingExtra."""
    with requires("obstore", "lake"):
        from obstore.store import from_url
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return from_url(url, mkdir=writes, automatic_cleanup=True)
    retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=PATIENCE_S)}
    if scheme not in ("s3", "s3a"):
        return from_url(url, retry_config=retries)
    provider: Any = None
    if "AWS_ACCESS_KEY_ID" not in os.environ and find_spec("boto3"):
        from obstore.auth.boto3 import Boto3CredentialProvider

        with suppress(ValueError):  # it knows none
            provider = Boto3CredentialProvider()
    checked: Any = {"checksum_algorithm": "SHA256"}
    return from_url(url, config=checked, retry_config=retries, credential_provider=provider)


def shortened(error: Exception) -> str:
    """What the store said, without the request that it was about and the library's inner workings."""
    text = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
    if found := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text):
        text = f"{found[1]}: {found[2].rstrip('.')}"
    return text.rpartition(" - ")[2][:MOST_TEXT]
