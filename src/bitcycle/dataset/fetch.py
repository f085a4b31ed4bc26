"""Files from a data set's official source, where that may be had without asking."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from bitcycle.dataset.base import logger
from bitcycle.errors import DataError

TIMEOUT_SECONDS = 20


def fetch(url: str, path: Path, remedy: str) -> Path:
    """Download `url` to `path`, which is either complete or absent afterwards.

    Raises:
        DataError: if that fails; says `remedy`.
    """
    logger.info("%s is missing; downloading it from %s", path, url)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urlopen(url, timeout=TIMEOUT_SECONDS) as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target)
        part.replace(path)
    except (URLError, OSError) as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path} is missing and cannot be downloaded from {url} ({error}). {remedy}") from error
    return path
