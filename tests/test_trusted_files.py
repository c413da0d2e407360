"""Files that another user may have made are refused with the reason and the remedy, and nothing waits for them."""

import os

import foreign_files
import pytest

from torchmpi_py import trusted_files

FLAGS = {"read": os.O_RDONLY, "append": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "replace": os.O_RDWR | os.O_TRUNC}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("make", [*foreign_files.NOT_OURS, *foreign_files.NOT_FILES], ids=lambda make: make.__name__)
@as_root
def test_what_is_refused(tmp_path, make, flags):
    path = tmp_path / "file"
    make(path)
    before = os.lstat(path)
    with pytest.raises(OSError, match="remedy") as caught:
        trusted_files.open_file(path, flags, remedy="the remedy")
    assert caught.value.filename == str(path)
    assert os.lstat(path) == before
    if make is foreign_files.link:
        assert (tmp_path / "elsewhere").read_text() == "untouched"


def test_a_size_limit(tmp_path):
    foreign_files.huge(tmp_path / "file")
    with pytest.raises(OSError, match="may have 1000"):
        trusted_files.read(tmp_path / "file", 1000)
    (tmp_path / "small").write_bytes(bytes(1000))
    assert trusted_files.read(tmp_path / "small", 1000) == bytes(1000)


def test_the_users_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("content")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "link").symlink_to("real/file")
    assert trusted_files.read(tmp_path / "folder" / "file", 100) == b"content"
    assert trusted_files.read(tmp_path / "link", 100) == b"content"
    os.close(trusted_files.open_file(tmp_path / "folder" / "file", os.O_WRONLY))
    with pytest.raises(OSError, match="symbolic link"):
        trusted_files.open_file(tmp_path / "link", os.O_WRONLY)
    os.link(tmp_path / "real" / "file", tmp_path / "second")
    with pytest.raises(OSError, match="another name"):
        trusted_files.open_file(tmp_path / "second", os.O_WRONLY | os.O_TRUNC)
    assert (tmp_path / "link").read_text() == "content"


@as_root
def test_owners(tmp_path, monkeypatch):
    path = tmp_path / "file"
    foreign_files.of_another(path)
    assert trusted_files.read(path, 100, owners=None) == b"{}"
    assert trusted_files.read(path, 100, owners={foreign_files.STRANGER}) == b"{}"
    assert not trusted_files.is_own(path)
    assert not trusted_files.is_own(tmp_path / "missing")
    # A file system that gives new files this owner, as NFS does with those of root.
    monkeypatch.setattr(trusted_files, "_owner_of_new_file", lambda path: foreign_files.STRANGER)
    assert trusted_files.read(path, 100) == b"{}"
    assert trusted_files.is_own(path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        trusted_files.read(tmp_path / "file", 100)
    os.close(trusted_files.open_file(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "file").read_bytes() == b""
