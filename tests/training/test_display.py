"""Log files."""

from __future__ import annotations

import logging

from bitcycle.training.display import log_to_file, logger


class FullDisk:
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_log_on_a_full_disk_is_named_in_one_line(tmp_path, capsys):
    """Each message printed a traceback of the library `logging`."""
    with log_to_file(tmp_path / "log.txt"):
        file = next(handler for handler in logger.handlers if isinstance(handler, logging.FileHandler))
        file.stream.close()
        file.stream = FullDisk()
        for number in range(3):
            logger.debug("message %d", number)
    assert capsys.readouterr().err == f"{tmp_path}/log.txt lacks messages: [Errno 28] No space left on device\n"
