"""Which owners, links and sizes of files are refused, with a remedy; test_files_of_others has every kind of file."""

import os

import foreign_files
import pytest

from torchmpi_py import trusted_files

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def test_a_size_limit(tmp_path):
    foreign_files.huge(tmp_path / "file")
    with pytest.raises(OSError, match="but the limit is 1000"):
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
    with pytest.raises(OSError, match=r"symbolic link.*; the remedy") as caught:
        trusted_files.open_file(tmp_path / "link", os.O_WRONLY, remedy="the remedy")
    assert caught.value.filename == str(tmp_path / "link")
    os.link(tmp_path / "real" / "file", tmp_path / "second")
    with pytest.raises(OSError, match="a second name"):
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
