"""The user's cache."""

from pathlib import Path

from bitcycle.cache import cached_file


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """A container may run under a number that no user has, without HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it answers for such a user
    made = cached_file(
        "numbers", lambda: [1], read=Path.read_bytes, write=lambda stream, made: stream.write(bytes(made))
    )
    assert made == [1]
